#include "tests/emulation/fake_cudart.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr unsigned char kFresh = 0xcd, kFreed = 0xdd;

std::int64_t FromEnvironment(const char* name, std::int64_t otherwise) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets variables meanwhile
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoll(value);
}

enum class Kind { kDevice, kPinned, kRegistered };

struct Allocation {
  std::size_t bytes = 0;
  Kind kind = Kind::kDevice;
};

// All that is not of one stream.
struct Runtime {
  std::mutex mutex;
  std::map<const char*, Allocation> allocations;
  std::map<std::string, std::pair<int, cudaError_t>> faults;
  std::vector<cudaStream_t> streams;
  std::size_t device_bytes = 0;
  std::atomic<int> lost{cudaSuccess};
  std::atomic<bool> hangs{false};
  std::atomic<std::int64_t> launches{0}, copied_bytes{0}, pageable_copies{0}, null_stream_uses{0};

  Runtime() {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets variables meanwhile
    const char* fault = std::getenv("FAKE_CUDA_FAULT");
    if (fault == nullptr) return;
    const std::string words(fault);
    const std::size_t calls = words.find(':'), error = words.find(':', calls + 1);
    faults[words.substr(0, calls)] = {
        std::atoi(words.c_str() + calls + 1),
        static_cast<cudaError_t>(std::atoi(words.c_str() + error + 1))};
  }
};
Runtime& The() {
  static Runtime* runtime = new Runtime;  // streams' threads may outlive statics
  return *runtime;
}

thread_local cudaError_t t_last = cudaSuccess;

cudaError_t Return(cudaError_t error) {
  if (error != cudaSuccess) t_last = error;  // NotReady, too
  return error;
}

bool RefusesOnly(cudaError_t error) {
  return error == cudaErrorMemoryAllocation || error == cudaErrorInvalidValue ||
         error == cudaErrorHostMemoryAlreadyRegistered || error == cudaErrorNotSupported;
}

// What happens to a call before it does anything.
cudaError_t Enter(const char* function) {
  Runtime& runtime = The();
  if (runtime.lost != cudaSuccess) return Return(static_cast<cudaError_t>(runtime.lost.load()));
  const std::lock_guard lock(runtime.mutex);
  const auto fault = runtime.faults.find(function);
  if (fault == runtime.faults.end() || fault->second.first-- > 0) return cudaSuccess;
  const cudaError_t error = fault->second.second;
  runtime.faults.erase(fault);
  if (!RefusesOnly(error)) runtime.lost = error;
  return Return(error);
}

// Null for memory that is the host's and not pinned.
const Allocation* Find(const void* memory) {
  const auto& allocations = The().allocations;
  auto found = allocations.upper_bound(static_cast<const char*>(memory));
  if (found == allocations.begin()) return nullptr;
  --found;
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(memory) - found->first);
  return offset < found->second.bytes ? &found->second : nullptr;
}

std::size_t MostMemory() {
  return static_cast<std::size_t>(FromEnvironment("FAKE_CUDA_MEMORY", std::int64_t{4} << 30));
}

cudaError_t Allocate(void** memory, std::size_t bytes, Kind kind) {
  Runtime& runtime = The();
  const std::lock_guard lock(runtime.mutex);
  if (kind == Kind::kDevice && runtime.device_bytes + bytes > MostMemory())
    return Return(cudaErrorMemoryAllocation);
  *memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(*memory, kFresh, bytes);
  runtime.allocations[static_cast<const char*>(*memory)] = {bytes, kind};
  if (kind == Kind::kDevice) runtime.device_bytes += bytes;
  return cudaSuccess;
}

cudaError_t Free(void* memory, Kind kind) {
  if (memory == nullptr) return cudaSuccess;
  Runtime& runtime = The();
  const std::lock_guard lock(runtime.mutex);
  const auto found = runtime.allocations.find(static_cast<const char*>(memory));
  if (found == runtime.allocations.end() || found->second.kind != kind)
    return Return(cudaErrorInvalidValue);
  if (kind == Kind::kDevice) runtime.device_bytes -= found->second.bytes;
  if (kind != Kind::kRegistered) {
    std::memset(memory, kFreed, found->second.bytes);
    std::free(memory);
  }
  runtime.allocations.erase(found);
  return cudaSuccess;
}

}  // namespace

struct CUstream_st {
  CUstream_st() : thread_([this] { Run(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void Add(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  bool Idle() {
    const std::lock_guard lock(mutex_);
    return work_.empty() && !busy_;
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return work_.empty() && !busy_; });
  }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stops_ || (!work_.empty() && !The().hangs); });
      if (stops_ && (work_.empty() || The().hangs)) return;
      std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      busy_ = true;
      lock.unlock();
      if (The().lost == cudaSuccess) work();
      work = nullptr;
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  bool stops_ = false;
  std::thread thread_;

  friend void kvtier::cuda_double::HangStreams(bool hang);
};

// What an event's work needs, which may come after the event was destroyed.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0;
  std::uint64_t passed = 0;
};
struct CUevent_st {
  const std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

namespace {

CUstream_st& Of(cudaStream_t stream) {
  if (stream != nullptr) return *stream;
  ++The().null_stream_uses;
  static CUstream_st* null_stream = [] {
    auto* made = new CUstream_st;
    const std::lock_guard lock(The().mutex);
    The().streams.push_back(made);
    return made;
  }();
  return *null_stream;
}

// Whether the ends are what the direction says; asynchronous copies want pinned host memory.
cudaError_t CheckCopy(const void* to, const void* from, cudaMemcpyKind kind) {
  Runtime& runtime = The();
  const std::lock_guard lock(runtime.mutex);
  const Allocation *target = Find(to), *source = Find(from);
  const bool to_device = target != nullptr && target->kind == Kind::kDevice;
  const bool from_device = source != nullptr && source->kind == Kind::kDevice;
  const bool wants_to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool wants_from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const bool wrong = to_device != wants_to || from_device != wants_from;
  if (kind != cudaMemcpyDefault && wrong) return Return(cudaErrorInvalidValue);
  if (target == nullptr || source == nullptr) ++runtime.pageable_copies;
  return cudaSuccess;
}

}  // namespace

namespace kvtier::cuda_double {

cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work) {
  if (const cudaError_t refused = Enter("launch"); refused != cudaSuccess) return refused;
  ++The().launches;
  Of(stream).Add(std::move(work));
  return cudaSuccess;
}

void Inject(const std::string& function, int calls, cudaError_t error) {
  const std::lock_guard lock(The().mutex);
  The().faults[function] = {calls, error};
}

void HangStreams(bool hang) {
  The().hangs = hang;
  const std::lock_guard lock(The().mutex);
  for (CUstream_st* stream : The().streams) stream->changed_.notify_all();
}

void Reset() {
  HangStreams(false);
  The().lost = cudaSuccess;
  t_last = cudaSuccess;
  const std::lock_guard lock(The().mutex);
  The().faults.clear();
}

Counters Count() {
  Runtime& runtime = The();
  const std::lock_guard lock(runtime.mutex);
  const auto owned =
      std::count_if(runtime.allocations.begin(), runtime.allocations.end(),
                    [](const auto& entry) { return entry.second.kind != Kind::kRegistered; });
  return {.device_bytes = runtime.device_bytes,
          .allocations = static_cast<std::size_t>(owned),
          .launches = runtime.launches,
          .copied_bytes = runtime.copied_bytes,
          .pageable_copies = runtime.pageable_copies,
          .null_stream_uses = runtime.null_stream_uses};
}

}  // namespace kvtier::cuda_double

#define KVT_ENTER(function) \
  if (const cudaError_t refused = Enter(function); refused != cudaSuccess) return refused

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  KVT_ENTER("cudaGetDeviceCount");
  *count = static_cast<int>(FromEnvironment("FAKE_CUDA_DEVICES", 1));
  return *count > 0 ? cudaSuccess : Return(cudaErrorNoDevice);
}
thread_local int t_device = 0;
cudaError_t cudaSetDevice(int device) {
  KVT_ENTER("cudaSetDevice");
  const auto devices = static_cast<int>(FromEnvironment("FAKE_CUDA_DEVICES", 1));
  if (device < 0 || device >= devices) return Return(cudaErrorInvalidDevice);
  t_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  KVT_ENTER("cudaGetDevice");
  *device = t_device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  KVT_ENTER("cudaDeviceGetPCIBusId");
  if (device < 0 || device >= FromEnvironment("FAKE_CUDA_DEVICES", 1))
    return Return(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<std::size_t>(size), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  KVT_ENTER("cudaGetDeviceProperties");
  *properties = {};
  std::strcpy(properties->name, "emulated device");
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  KVT_ENTER("cudaMalloc");
  return Allocate(memory, bytes, Kind::kDevice);
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  KVT_ENTER("cudaMemGetInfo");
  *total = MostMemory();
  *free = *total - The().device_bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) { return Free(memory, Kind::kDevice); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  KVT_ENTER("cudaHostAlloc");
  return Allocate(memory, bytes, Kind::kPinned);
}
cudaError_t cudaFreeHost(void* memory) { return Free(memory, Kind::kPinned); }
cudaError_t cudaHostRegister(void* memory, std::size_t bytes, unsigned) {
  KVT_ENTER("cudaHostRegister");
  const std::lock_guard lock(The().mutex);
  if (Find(memory) != nullptr) return Return(cudaErrorHostMemoryAlreadyRegistered);
  The().allocations[static_cast<const char*>(memory)] = {bytes, Kind::kRegistered};
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* memory, unsigned) {
  *device = memory;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) { return Free(memory, Kind::kRegistered); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  KVT_ENTER("cudaStreamCreateWithFlags");
  *stream = new CUstream_st;
  const std::lock_guard lock(The().mutex);
  The().streams.push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard lock(The().mutex);
    std::erase(The().streams, stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  KVT_ENTER("cudaStreamQuery");
  return Of(stream).Idle() ? cudaSuccess : Return(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  KVT_ENTER("cudaStreamSynchronize");
  Of(stream).Wait();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  KVT_ENTER("cudaMemcpyAsync");
  if (const cudaError_t wrong = CheckCopy(to, from, kind); wrong != cudaSuccess) return wrong;
  The().copied_bytes += static_cast<std::int64_t>(bytes);
  Of(stream).Add([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  KVT_ENTER("cudaMemsetAsync");
  Of(stream).Add([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  KVT_ENTER("cudaEventCreateWithFlags");
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  KVT_ENTER("cudaEventRecord");
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(event->state->mutex);
    number = ++event->state->recorded;
  }
  Of(stream).Add([number, state = event->state] {
    {
      const std::lock_guard lock(state->mutex);
      state->passed = number;
    }
    state->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  KVT_ENTER("cudaStreamWaitEvent");
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(event->state->mutex);
    number = event->state->recorded;
  }
  Of(stream).Add([number, state = event->state] {
    std::unique_lock lock(state->mutex);
    state->changed.wait(lock, [&] { return state->passed >= number; });
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  KVT_ENTER("cudaEventQuery");
  const std::lock_guard lock(event->state->mutex);
  return event->state->passed >= event->state->recorded ? cudaSuccess : Return(cudaErrorNotReady);
}

cudaError_t cudaGetLastError() {
  if (The().lost != cudaSuccess) return static_cast<cudaError_t>(The().lost.load());
  return std::exchange(t_last, cudaSuccess);
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    default:
      return "cudaErrorOfTheSubstitute";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

}  // extern "C"
