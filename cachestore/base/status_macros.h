#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// The distribution's abseil (20220623) has no status macros; these have the shape of the ones that
// came later.
#define KVT_RETURN_IF_ERROR(expr)                          \
  if (absl::Status kvt_status = (expr); kvt_status.ok()) { \
  } else                                                   \
    return kvt_status

#define KVT_CONCAT_INNER_(a, b) a##b
#define KVT_CONCAT_(a, b) KVT_CONCAT_INNER_(a, b)
#define KVT_ASSIGN_OR_RETURN(lhs, expr) \
  KVT_ASSIGN_OR_RETURN_(KVT_CONCAT_(kvt_or_, __LINE__), lhs, expr)
#define KVT_ASSIGN_OR_RETURN_(tmp, lhs, expr)    \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = *std::move(tmp)
