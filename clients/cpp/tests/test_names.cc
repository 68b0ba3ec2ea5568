// Tests that names generated from the schema are neither keywords nor macros of common headers. Compiling this file is
// the test: the headers come first, and their macros would break the generated ones.
#include <endian.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/param.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <syslog.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <complex>
#include <cstdio>
#include <cstdlib>

#include <kvgrpc/kvgrpc.h>

#include "kvgrpc/peer/v1/peer.grpc.pb.h"
#include "kvgrpc/peer/v1/rank.grpc.pb.h"
#include "kvgrpc/session/v1/rank.pb.h"
#include "kvgrpc/session/v1/session.pb.h"

#include <gtest/gtest.h>

namespace {

TEST(Names, SchemasOfLeadsAreInTheirOwnPackages) {
  const auto* pool = google::protobuf::DescriptorPool::generated_pool();
  for (const char* name : {"kvgrpc/peer/v1/peer.proto", "kvgrpc/peer/v1/rank.proto", "kvgrpc/session/v1/session.proto",
                           "kvgrpc/session/v1/rank.proto"}) {
    const auto* file = pool->FindFileByName(name);
    ASSERT_NE(file, nullptr) << name;
    EXPECT_NE(file->package(), "kvgrpc.v1");
  }
}

}  // namespace
