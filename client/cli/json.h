#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>
#include <string>

#include "kvtier/v1/kv_tier.pb.h"

namespace kvtier::client {

// A message with all its fields, as the proto names them: numbers as numbers, enumerators in lower
// case without their type's name ("sealed").
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);

// One line, ended by a newline. Bytes that are not UTF-8 become U+FFFD.
std::string JsonLine(const nlohmann::ordered_json& json);

// Protobuf's strings hold nothing else.
bool IsUtf8(const std::string& text);

// SEQUENCE_STATE_SEALED -> "sealed"
std::string EnumeratorName(const google::protobuf::EnumValueDescriptor& value);

// Everything but `free`: what the memory's holder takes.
std::uint64_t StoredBytes(const v1::MemoryParts& memory);

}  // namespace kvtier::client
