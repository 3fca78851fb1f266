# Rooms are libraries, globbed: a file added to a room is built without a word here.
#
#   kvtier_room(NAME kvtier_kernels [DIRS . sub] [EXCLUDE main.cc cli/] [DEPS targets] [PCH target])
#   kvtier_program(NAME kvtierd SOURCES main.cc [DEPS targets] [PCH target] [INSTALL])
#   kvtier_tests(NAME kernels [DEPS targets] [DEFINITIONS A=B] [LABELS slow] [TIMEOUT seconds] [RUNS targets] [PCH target])
#   kvtier_pch(NAME kvtier_pch HEADERS <a.h> [DEPS targets] [OPTIONS flags])
#
# Sources and headers are found below DIRS, however deep; EXCLUDE names files or folders that belong to another target.
# PCH: whose headers most files of the target include.

# The files of `dirs` with the given endings, less those in `exclude`, as absolute paths.
function(kvtier_glob out dirs exclude)
  set(patterns "")
  foreach(dir IN LISTS dirs)
    foreach(ending IN LISTS ARGN)
      list(APPEND patterns "${dir}/*.${ending}")
    endforeach()
  endforeach()
  file(GLOB_RECURSE files RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}" CONFIGURE_DEPENDS ${patterns})

  set(kept "")
  foreach(file IN LISTS files)
    set(excluded OFF)
    foreach(name IN LISTS exclude)
      string(FIND "${file}" "${name}" position)
      if(file STREQUAL name OR (name MATCHES "/$" AND position EQUAL 0))
        set(excluded ON)
      endif()
    endforeach()
    if(NOT excluded)
      list(APPEND kept "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
    endif()
  endforeach()
  set(${out} "${kept}" PARENT_SCOPE)
endfunction()

# Links DEPS that exist. A room without sources is no target yet: that is said, and the rest is built.
function(kvtier_link target scope)
  foreach(dep IN LISTS ARGN)
    if(NOT dep MATCHES "^kvtier_" OR TARGET ${dep})
      target_link_libraries(${target} ${scope} ${dep})
    else()
      message(STATUS "${target}: no ${dep} to link, it has no sources")
    endif()
  endforeach()
endfunction()

# What a compiled target gets beside its own links. pch: a target of kvtier_pch, or none.
function(kvtier_compile target pch)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE kvtier_flags)
  if(pch AND KVTIER_PCH)
    target_precompile_headers(${target} REUSE_FROM ${pch})
  endif()
endfunction()

# Compiles HEADERS once. A compiler cache needs CCACHE_SLOPPINESS for it, which the presets set.
function(kvtier_pch)
  cmake_parse_arguments(arg "" "NAME" "HEADERS;DEPS;OPTIONS" ${ARGN})
  if(NOT KVTIER_PCH)
    return()
  endif()
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/${arg_NAME}.cc" CONTENT "// Carries the precompiled header.\n")
  add_library(${arg_NAME} OBJECT "${PROJECT_BINARY_DIR}/${arg_NAME}.cc")
  target_link_libraries(${arg_NAME} PRIVATE kvtier_flags ${arg_DEPS})
  target_compile_options(${arg_NAME} PRIVATE ${arg_OPTIONS})
  target_precompile_headers(${arg_NAME} PRIVATE ${arg_HEADERS})
endfunction()

function(kvtier_room)
  cmake_parse_arguments(arg "" "NAME;PCH" "DIRS;EXCLUDE;DEPS" ${ARGN})
  if(NOT arg_DIRS)
    set(arg_DIRS .)
  endif()
  kvtier_glob(headers "${arg_DIRS}" "${arg_EXCLUDE}" h)
  kvtier_glob(sources "${arg_DIRS}" "${arg_EXCLUDE}" cc)
  if(NOT headers AND NOT sources)
    message(STATUS "${arg_NAME}: no sources, skipped")
    return()
  endif()

  if(sources)
    add_library(${arg_NAME} STATIC ${sources})
    set(scope PUBLIC)
    kvtier_compile(${arg_NAME} "${arg_PCH}")
  else()
    add_library(${arg_NAME} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_sources(${arg_NAME} ${scope} FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}" FILES ${headers})
  target_include_directories(${arg_NAME} ${scope} "${PROJECT_SOURCE_DIR}")
  kvtier_link(${arg_NAME} ${scope} ${arg_DEPS})
endfunction()

function(kvtier_program)
  cmake_parse_arguments(arg "INSTALL" "NAME;PCH" "SOURCES;DEPS" ${ARGN})
  set(sources "")
  foreach(source IN LISTS arg_SOURCES)
    cmake_path(ABSOLUTE_PATH source)
    # Globbed, so that the file's appearing later is noticed.
    file(GLOB found CONFIGURE_DEPENDS "${source}")
    list(APPEND sources ${found})
  endforeach()
  if(NOT sources)
    message(STATUS "${arg_NAME}: no sources, skipped")
    return()
  endif()
  add_executable(${arg_NAME} ${sources})
  kvtier_compile(${arg_NAME} "${arg_PCH}")
  kvtier_link(${arg_NAME} PRIVATE ${arg_DEPS})
  if(arg_INSTALL)
    install(TARGETS ${arg_NAME})
  endif()
endfunction()

# What is tested is in the rooms. Tests themselves are half of the time that a sanitizer's build takes.
if(KVTIER_SANITIZE MATCHES "undefined")
  set(kvtier_test_options -fno-sanitize=undefined)
endif()

function(kvtier_tests)
  cmake_parse_arguments(arg "" "NAME;TIMEOUT;PCH" "DEPS;DEFINITIONS;LABELS;RUNS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  kvtier_glob(sources "${arg_NAME}" "" cc)
  if(NOT sources MATCHES "_test\\.cc")
    message(STATUS "tests/${arg_NAME}: no tests, skipped")
    return()
  endif()
  foreach(needed IN LISTS arg_DEPS arg_RUNS)
    if(needed MATCHES "^kvtier" AND NOT TARGET ${needed})
      message(WARNING "tests/${arg_NAME} is left out: it needs ${needed}, which has no sources")
      return()
    endif()
  endforeach()

  set(target ${arg_NAME}_tests)
  add_executable(${target} ${sources})
  kvtier_compile(${target} "${arg_PCH}")
  target_compile_options(${target} PRIVATE ${kvtier_test_options})
  target_compile_definitions(${target} PRIVATE KVTIER_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data" ${arg_DEFINITIONS})
  target_link_libraries(${target} PRIVATE GTest::gmock GTest::gtest_main)
  kvtier_link(${target} PRIVATE kvtier_test_support ${arg_DEPS})
  if(arg_RUNS)
    add_dependencies(${target} ${arg_RUNS})
  endif()

  # A list in PROPERTIES must survive two evaluations.
  list(JOIN arg_LABELS "\\;" extra_labels)
  set(labels "${arg_NAME}")
  if(extra_labels)
    set(labels "${arg_NAME}\\;${extra_labels}")
  endif()
  # A parameter's bytes, which may be addresses, are no part of a test's name.
  gtest_discover_tests(
    ${target}
    NO_PRETTY_VALUES
    TEST_PREFIX "${arg_NAME}."
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${labels}")
endfunction()

# Each method of the unittest classes in tests/NAME/*_test.py is a test of its own, so that a skip is counted as one.
#
#   kvtier_python_tests(NAME deploy ENVIRONMENT KVTIER_KVTIERD=...)
function(kvtier_python_tests)
  cmake_parse_arguments(arg "" "NAME" "ENVIRONMENT" ${ARGN})
  set(folder "${CMAKE_CURRENT_SOURCE_DIR}/${arg_NAME}")
  # The distribution's Python: it sees the packages that scripts/install-deps installs.
  find_program(KVTIER_PYTHON python3 PATHS /usr/bin NO_DEFAULT_PATH REQUIRED)
  file(GLOB files CONFIGURE_DEPENDS "${folder}/*_test.py")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
  foreach(file IN LISTS files)
    get_filename_component(module "${file}" NAME_WE)
    file(STRINGS "${file}" lines REGEX "^class [A-Za-z]+|^    def test_[a-z0-9_]+")
    foreach(line IN LISTS lines)
      if(line MATCHES "^class ([A-Za-z]+)")
        set(class "${CMAKE_MATCH_1}")
      elseif(line MATCHES "def (test_[a-z0-9_]+)")
        set(name "${module}.${class}.${CMAKE_MATCH_1}")
        add_test(
          NAME "${arg_NAME}.${name}"
          COMMAND "${KVTIER_PYTHON}" -B -m unittest -v "${name}"
          WORKING_DIRECTORY "${folder}")
        set_tests_properties(
          "${arg_NAME}.${name}" PROPERTIES ENVIRONMENT "${arg_ENVIRONMENT}" LABELS "${arg_NAME}" TIMEOUT 120
                                           SKIP_REGULAR_EXPRESSION "skipped=[1-9]")
      endif()
    endforeach()
  endforeach()
endfunction()
