#include "server.h"

namespace kvgrpc::testing {
namespace {

void add_detail(client::Status& details, const std::string& type, const google::protobuf::Message& message) {
  auto& any = *details.add_details();
  any.set_type_url("type.googleapis.com/google.rpc." + type);
  any.set_value(message.SerializeAsString());
}

struct Errors : WithServer {
  Error error(const Status& status) {
    server.pools.allocate_blocks = [status](auto*, auto&, auto*) { return status; };
    return error_of([&] { client().call(&PoolStub::AllocateBlocks, v1::AllocateBlocksRequest()); });
  }
};

TEST_F(Errors, AnErrorHasAllThatTheDetailsSay) {
  client::ErrorInfo info;
  info.set_reason("POOL_EXHAUSTED");
  info.set_domain("kvgrpc.dev");
  auto& metadata = *info.mutable_metadata();
  metadata["next"] = "RETRY_HERE";
  metadata["engine_id"] = "P";
  metadata["incarnation"] = "9007199254740991";
  metadata["group"] = "0";
  client::BadRequest bad;
  auto& violation = *bad.add_field_violations();
  violation.set_field("group_block_counts[0]");
  violation.set_description("too many");
  client::RetryInfo retry;
  *retry.mutable_retry_delay() = to_duration(1500ms);
  client::Status details;
  add_detail(details, "ErrorInfo", info);
  add_detail(details, "BadRequest", bad);
  add_detail(details, "RetryInfo", retry);

  const auto found =
      error(Status(StatusCode::RESOURCE_EXHAUSTED, "POOL_EXHAUSTED: 3 free", details.SerializeAsString()));
  EXPECT_EQ(found.code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(found.is(v1::FAILURE_REASON_POOL_EXHAUSTED));
  EXPECT_EQ(found.reason_name(), "POOL_EXHAUSTED");
  EXPECT_EQ(found.next(), v1::NEXT_STEP_RETRY_HERE);
  EXPECT_TRUE(found.may_retry_here());
  EXPECT_EQ(found.engine_id(), "P");
  EXPECT_EQ(found.incarnation(), 9007199254740991U);
  EXPECT_EQ(found.metadata(), (std::map<std::string, std::string>{{"group", "0"}}));
  ASSERT_EQ(found.violations().size(), 1U);
  EXPECT_EQ(found.violations()[0].field, "group_block_counts[0]");
  EXPECT_EQ(found.retry_delay(), 1500ms);
  EXPECT_EQ(found.message(), "3 free");
  EXPECT_EQ(found.what(), "RESOURCE_EXHAUSTED POOL_EXHAUSTED: 3 free; group_block_counts[0]: too many "
                          "(PoolService/AllocateBlocks at " + server.address() + ")");
}

TEST_F(Errors, AnErrorTellsWhatWasCalledAndWhereAndTheKeyThatRepeatsTheCall) {
  const auto made = error(Status(StatusCode::RESOURCE_EXHAUSTED, "full"));
  EXPECT_EQ(made.method(), "PoolService/AllocateBlocks");
  EXPECT_EQ(made.address(), server.address());
  EXPECT_EQ(made.idempotency_key().size(), 32U);
  v1::AllocateBlocksRequest request;
  request.set_idempotency_key("mine");
  EXPECT_EQ(error_of([&] { client().call(&PoolStub::AllocateBlocks, request); }).idempotency_key(), "mine");
  TransferWatch watch(client());
  EXPECT_EQ(error_of([&] { watch.next(kLong); }).method(), "TransferService/WatchTransfers");
}

TEST_F(Errors, AStatusWithoutDetailsHasItsCode) {
  const auto found = error(Status(StatusCode::UNAUTHENTICATED, "who are you?"));
  EXPECT_EQ(found.code(), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(found.reason(), v1::FAILURE_REASON_UNSPECIFIED);
  EXPECT_EQ(found.reason_name(), "");
  EXPECT_EQ(found.next(), v1::NEXT_STEP_UNSPECIFIED);
  EXPECT_FALSE(found.retry_delay());
  EXPECT_EQ(found.message(), "who are you?");
}

TEST_F(Errors, DetailsThatCannotBeReadAreLeftOut) {
  EXPECT_EQ(error(Status(StatusCode::ABORTED, "no", "\xff\xff")).code(), StatusCode::ABORTED);
}

TEST_F(Errors, AReasonOfAnotherDomainIsNotOurs) {
  const auto found = error(refusal(StatusCode::ABORTED, "LEASE_EXPIRED", {{"next", "RETRY_HERE"}}, "proxy.example"));
  EXPECT_EQ(found.reason(), v1::FAILURE_REASON_UNSPECIFIED);
  EXPECT_FALSE(found.may_retry_here());
}

TEST_F(Errors, AnUnknownReasonReadsAsInternalAndIsNotRetried) {
  const auto found = error(refusal(StatusCode::ABORTED, "SUN_SET", {{"next", "RETRY_HERE"}}));
  EXPECT_EQ(found.reason(), v1::FAILURE_REASON_INTERNAL);
  EXPECT_EQ(found.reason_name(), "SUN_SET");
  EXPECT_EQ(found.next(), v1::NEXT_STEP_UNSPECIFIED);
  EXPECT_EQ(found.next_name(), "RETRY_HERE");
  EXPECT_FALSE(found.may_retry_here());
}

TEST_F(Errors, AServerThatIsAwayIsUnavailable) {
  server.stop();
  const auto found = error_of([&] { client().call(&PoolStub::AllocateBlocks, v1::AllocateBlocksRequest()); });
  EXPECT_EQ(found.code(), StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace kvgrpc::testing
