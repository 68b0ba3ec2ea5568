#include <gtest/gtest.h>
#include <kvgrpc/kvgrpc.h>

namespace {

using namespace kvgrpc;

constexpr char kSecret[] = "open sesame";

TEST(Redacted, TextShowsNoSecretAtAnyDepthAndLeavesTheMessageAsItIs) {
  v1::PullBlocksRequest request;
  request.mutable_grant()->set_token(kSecret);
  request.mutable_grant()->set_engine_id("P");
  request.set_transfer_key(kSecret);
  request.set_request_id("r");
  const std::string text = redacted(request);
  EXPECT_EQ(text.find(kSecret), std::string::npos) << text;
  EXPECT_NE(text.find("[REDACTED]"), std::string::npos) << text;
  EXPECT_NE(text.find("engine_id: \"P\""), std::string::npos) << text;
  EXPECT_EQ(request.grant().token(), kSecret);
}

TEST(Redacted, EachOfSeveralSecretsIsHidden) {
  v1::HandshakeRequest request;
  request.add_proofs(kSecret);
  request.add_proofs(kSecret);
  EXPECT_EQ(redacted(request).find(kSecret), std::string::npos);
}

TEST(Transfers, OneThatEndedWithoutItsKvIsAnError) {
  v1::Transfer transfer;
  transfer.set_transfer_id("t-1");
  transfer.set_state(v1::TRANSFER_STATE_ACTIVE);
  check(transfer);
  transfer.set_state(v1::TRANSFER_STATE_SUCCEEDED);
  check(transfer);
  transfer.set_state(v1::TRANSFER_STATE_FAILED);
  transfer.mutable_failure()->set_reason(v1::FAILURE_REASON_LEASE_EXPIRED);
  transfer.mutable_failure()->set_next(v1::NEXT_STEP_RECOMPUTE);
  transfer.mutable_failure()->set_phase(v1::TRANSFER_PHASE_SETTLE);
  transfer.mutable_failure()->set_message("too late");
  try {
    check(transfer);
    FAIL() << "it was no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), grpc::StatusCode::ABORTED);
    EXPECT_EQ(error.reason_name(), "LEASE_EXPIRED");
    EXPECT_EQ(error.next(), v1::NEXT_STEP_RECOMPUTE);
    EXPECT_EQ(error.message(), "too late");
    EXPECT_EQ(error.metadata().at("phase"), "settle");
    EXPECT_EQ(error.metadata().at("transfer_id"), "t-1");
  }
}

TEST(Leases, OneThatWasTakenBackIsOver) { EXPECT_TRUE(is_over(v1::LEASE_STATE_RECLAIMED)); }

}  // namespace
