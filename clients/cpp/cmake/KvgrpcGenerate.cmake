# kvgrpc_readable(OUT ROOT)
#
# Sets OUT to a folder with the schema below ROOT that the found protoc can read. That is ROOT itself or, for protoc 3,
# a copy without the option debug_redact, which protoc 3 does not know and which changes no message.
function(kvgrpc_readable out root)
  execute_process(COMMAND ${KVGRPC_PROTOC} --version OUTPUT_VARIABLE version)
  if(NOT version MATCHES "libprotoc 3\\.")
    set(${out} ${root} PARENT_SCOPE)
    return()
  endif()
  set(copy "${CMAKE_CURRENT_BINARY_DIR}/proto")
  file(GLOB_RECURSE files RELATIVE ${root} CONFIGURE_DEPENDS ${root}/kvgrpc/*.proto)
  foreach(name IN LISTS files)
    file(READ "${root}/${name}" text)
    string(REPLACE " [debug_redact = true]" "" text "${text}")
    set(before "")
    if(EXISTS "${copy}/${name}")
      file(READ "${copy}/${name}" before)
    endif()
    if(NOT text STREQUAL before)
      file(WRITE "${copy}/${name}" "${text}")
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${root}/${name}")
  endforeach()
  set(${out} ${copy} PARENT_SCOPE)
endfunction()

# kvgrpc_generate(OUT ROOT dir PACKAGE folder FILES name... [SERVICES])
#
# Generates C++ of ROOT/PACKAGE/NAME.proto below KVGRPC_GENERATED_DIR, and sets OUT to the generated files. With
# SERVICES it also generates the stubs. Both generators have their default options.
set(KVGRPC_GENERATED_DIR "${CMAKE_CURRENT_BINARY_DIR}/generated")

function(kvgrpc_generate out)
  cmake_parse_arguments(ARG "SERVICES" "ROOT;PACKAGE" "FILES" ${ARGN})
  file(MAKE_DIRECTORY ${KVGRPC_GENERATED_DIR})
  set(all "")
  foreach(name IN LISTS ARG_FILES)
    set(base "${KVGRPC_GENERATED_DIR}/${ARG_PACKAGE}/${name}")
    set(made "${base}.pb.cc" "${base}.pb.h")
    set(plugin "")
    if(ARG_SERVICES)
      list(APPEND made "${base}.grpc.pb.cc" "${base}.grpc.pb.h")
      set(plugin "--grpc_out=${KVGRPC_GENERATED_DIR}" "--plugin=protoc-gen-grpc=${KVGRPC_GRPC_PLUGIN}")
    endif()
    add_custom_command(
      OUTPUT ${made}
      COMMAND ${KVGRPC_PROTOC} -I ${ARG_ROOT} --cpp_out=${KVGRPC_GENERATED_DIR} ${plugin}
              ${ARG_ROOT}/${ARG_PACKAGE}/${name}.proto
      DEPENDS ${ARG_ROOT}/${ARG_PACKAGE}/${name}.proto
      VERBATIM)
    list(APPEND all ${made})
  endforeach()
  set(${out} ${all} PARENT_SCOPE)
endfunction()
