#include "service/rpc/work_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/synchronization/notification.h"

namespace kvtier::service {
namespace {

using Priority = WorkQueue::Priority;
using ::testing::ElementsAre;

// While its one thread is busy everything waits; then reads for decode go before appends from
// prefill, however long those have waited, and in each kind the first comes first.
TEST(WorkQueue, ReadsGoBeforeAppendsThatWait) {
  absl::Notification begun, go, over;
  std::vector<int> order;  // of that one thread
  WorkQueue queue(1, 100);
  ASSERT_TRUE(queue.Post(Priority::kAppend, [&] {
    begun.Notify();
    go.WaitForNotification();
  }));
  begun.WaitForNotification();
  const auto post = [&](Priority priority, int number) {
    ASSERT_TRUE(queue.Post(priority, [&order, number] { order.push_back(number); }));
  };
  post(Priority::kAppend, 5);
  post(Priority::kAppend, 6);
  post(Priority::kRead, 3);
  post(Priority::kControl, 1);
  post(Priority::kRead, 4);
  post(Priority::kControl, 2);
  ASSERT_TRUE(queue.Post(Priority::kAppend, [&] { over.Notify(); }));
  go.Notify();
  over.WaitForNotification();
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(WorkQueue, TakesNoMoreThanItsBoundAndRunsWhatItTook) {
  int ran = 0;
  {
    absl::Notification begun, go;
    WorkQueue queue(1, 2);
    ASSERT_TRUE(queue.Post(Priority::kRead, [&] {
      begun.Notify();
      go.WaitForNotification();
    }));
    begun.WaitForNotification();
    EXPECT_TRUE(queue.Post(Priority::kRead, [&] { ++ran; }));
    EXPECT_TRUE(queue.Post(Priority::kAppend, [&] { ++ran; }));
    EXPECT_FALSE(queue.Post(Priority::kControl, [&] { ++ran; }));
    go.Notify();
  }
  EXPECT_EQ(ran, 2);
}

}  // namespace
}  // namespace kvtier::service
