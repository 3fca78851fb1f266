#include "client/cli/json.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cctype>
#include <utility>

namespace kvtier::client {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using nlohmann::ordered_json;

// The two ways protobuf reads a field, of which one repeats with an index.
template <class Single, class Repeated>
ordered_json Values(bool repeated, int count, const Single& single, const Repeated& at) {
  if (!repeated) return single();
  ordered_json list = ordered_json::array();
  for (int i = 0; i < count; ++i) list.push_back(at(i));
  return list;
}

ordered_json FieldToJson(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  const bool repeated = field.is_repeated();
  const int count = repeated ? reflection.FieldSize(message, &field) : 0;
  const auto values = [&](auto get, auto get_repeated, auto convert) {
    return Values(
        repeated, count, [&] { return convert((reflection.*get)(message, &field)); },
        [&](int i) { return convert((reflection.*get_repeated)(message, &field, i)); });
  };
  const auto as_it_is = [](const auto& value) { return ordered_json(value); };
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return values(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32, as_it_is);
    case FieldDescriptor::CPPTYPE_UINT64:
      return values(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64, as_it_is);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return values(&Reflection::GetDouble, &Reflection::GetRepeatedDouble, as_it_is);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return values(&Reflection::GetFloat, &Reflection::GetRepeatedFloat, as_it_is);
    case FieldDescriptor::CPPTYPE_BOOL:
      return values(&Reflection::GetBool, &Reflection::GetRepeatedBool, as_it_is);
    case FieldDescriptor::CPPTYPE_STRING:
      return values(&Reflection::GetString, &Reflection::GetRepeatedString, as_it_is);
    case FieldDescriptor::CPPTYPE_ENUM:
      return values(&Reflection::GetEnum, &Reflection::GetRepeatedEnum,
                    [](const auto* value) { return ordered_json(EnumeratorName(*value)); });
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return Values(
          repeated, count, [&] { return ToJson(reflection.GetMessage(message, &field)); },
          [&](int i) { return ToJson(reflection.GetRepeatedMessage(message, &field, i)); });
    default:
      return nullptr;  // signed numbers: the contract has none
  }
}

}  // namespace

ordered_json ToJson(const Message& message) {
  ordered_json object = ordered_json::object();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    object[type.field(i)->name()] = FieldToJson(message, *type.field(i));
  }
  return object;
}

bool IsUtf8(const std::string& text) {
  try {
    static_cast<void>(ordered_json(text).dump());
    return true;
  } catch (const ordered_json::type_error&) {
    return false;
  }
}

std::string JsonLine(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string EnumeratorName(const google::protobuf::EnumValueDescriptor& value) {
  constexpr std::string_view kUnspecified = "UNSPECIFIED";
  // Enumerator 0 is TYPE_UNSPECIFIED, which tells the prefix that all share.
  const std::string& zero = value.type()->value(0)->name();
  std::string name = value.name();
  if (zero.ends_with(kUnspecified)) name = name.substr(zero.size() - kUnspecified.size());
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

std::uint64_t StoredBytes(const v1::MemoryParts& memory) {
  return memory.codes() + memory.scales() + memory.residual() + memory.header() + memory.slack() +
         memory.staging();
}

}  // namespace kvtier::client
