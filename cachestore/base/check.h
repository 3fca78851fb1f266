#pragma once

#include <cstdio>
#include <cstdlib>

// An invariant of kvtier's own. Stays on in release: a wrong page silently served is worse than a
// restart.
#define KVT_CHECK(condition)                                                                \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "kvtier: broken invariant: %s at %s:%d\n", #condition, __FILE__, \
                   __LINE__);                                                               \
      std::abort();                                                                         \
    }                                                                                       \
  } while (false)
