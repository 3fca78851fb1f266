# How every translation unit is compiled and linked. Rooms get it by linking kvtier_flags.
include(GNUInstallDirs)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
# Each header of a room is compiled alone by the target all_verify_interface_header_sets.
set(CMAKE_VERIFY_INTERFACE_HEADER_SETS ON)

# clang refuses a precompiled header whose definitions differ from the user's.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(KVTIER_PCH OFF)
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug or Release" FORCE)
endif()
# -g1 keeps function names and lines in stack traces at a fraction of the size of -g, and compiles in three quarters of
# the time. With -DKVTIER_DEBUG_INFO=-g a debugger sees variables, too.
set(KVTIER_DEBUG_INFO "-g1" CACHE STRING "Debug information of Debug builds")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 ${KVTIER_DEBUG_INFO} -D_GLIBCXX_ASSERTIONS")
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1 -DNDEBUG")

# A codec gives the same bits wherever it is compiled: contraction of a * b + c is off (it is on by default, and shows
# on machines with FMA). The other two change no value; they let loops be vectorized.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-fno-math-errno;-fno-trapping-math>")

find_program(KVTIER_CCACHE ccache)
if(KVTIER_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${KVTIER_CCACHE}")
endif()

# At -O3, g++ 12 finds overlaps and overruns inside std::string that aren't there.
set(kvtier_false_alarms -Wno-restrict -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)

add_library(kvtier_flags INTERFACE)
target_compile_options(
  kvtier_flags
  INTERFACE -Wall
            -Wextra
            -Wpedantic
            -Wshadow
            -Wconversion
            -Wno-sign-conversion  # clang counts it in -Wconversion
            -Wno-missing-field-initializers  # designated initializers leave out what keeps its default
            $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>
            "$<$<AND:$<CXX_COMPILER_ID:GNU>,$<CONFIG:Release>>:${kvtier_false_alarms}>"
            $<$<BOOL:${KVTIER_WERROR}>:-Werror>)

# Stack traces and __FILE__ name files as the repository does, and two checkouts share a cache.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>")

find_program(KVTIER_LINKER NAMES mold ld.lld)
if(KVTIER_LINKER)
  get_filename_component(kvtier_linker_name "${KVTIER_LINKER}" NAME)
  string(REPLACE "ld." "" kvtier_linker_name "${kvtier_linker_name}")
  add_link_options("-fuse-ld=${kvtier_linker_name}")
endif()

if(KVTIER_SANITIZE)
  set(kvtier_sanitize "-fsanitize=${KVTIER_SANITIZE}")
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${kvtier_sanitize};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options(${kvtier_sanitize})
endif()
