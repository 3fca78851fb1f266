# "kvtier/version.h" in the build directory: the version of project() and the git revision.
#
# The revision is asked for at each build, and the header only written when it changed. This file is both the module
# that sets that up and the script that the build runs.
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(kvtier_version_dir "${PROJECT_BINARY_DIR}/version")
  add_custom_target(
    kvtier_version_header
    COMMAND
      ${CMAKE_COMMAND} -D VERSION=${PROJECT_VERSION} -D SOURCE_DIR=${PROJECT_SOURCE_DIR} -D
      OUTPUT=${kvtier_version_dir}/kvtier/version.h -P "${CMAKE_CURRENT_LIST_FILE}"
    BYPRODUCTS "${kvtier_version_dir}/kvtier/version.h"
    COMMENT "Asking git for the revision"
    VERBATIM)
  add_library(kvtier_version INTERFACE)
  add_dependencies(kvtier_version kvtier_version_header)
  target_include_directories(kvtier_version INTERFACE "${kvtier_version_dir}")
  return()
endif()

set(REVISION "unknown")
execute_process(
  COMMAND git -C "${SOURCE_DIR}" describe --always --dirty --abbrev=12 --exclude=*
  OUTPUT_VARIABLE described
  RESULT_VARIABLE failed
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(failed EQUAL 0)
  set(REVISION "${described}")
endif()
configure_file("${CMAKE_CURRENT_LIST_DIR}/version.h.in" "${OUTPUT}" @ONLY)
