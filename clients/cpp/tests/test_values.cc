#include <gtest/gtest.h>
#include <kvgrpc/kvgrpc.h>

namespace kvgrpc {
namespace {

template <class Enum>
Enum unknown() {
  return static_cast<Enum>(900);
}

TEST(States, AnUnknownStateIsNotAnEnd) {
  EXPECT_FALSE(is_over(unknown<v1::TransferState>()));
  EXPECT_FALSE(is_over(v1::TRANSFER_STATE_UNSPECIFIED));
  EXPECT_FALSE(is_over(unknown<v1::LeaseState>()));
  EXPECT_FALSE(is_over(v1::LEASE_STATE_LIVE));
  EXPECT_TRUE(is_over(v1::TRANSFER_STATE_CANCELLED));
  EXPECT_TRUE(is_over(v1::LEASE_STATE_LOST));
}

TEST(States, AnUnknownDispositionIsQuarantined) {
  v1::Transfer transfer;
  transfer.set_state(v1::TRANSFER_STATE_SUCCEEDED);
  transfer.set_memory(unknown<v1::MemoryDisposition>());
  EXPECT_EQ(disposition(transfer), v1::MEMORY_DISPOSITION_QUARANTINED);
  EXPECT_FALSE(may_reuse_memory(transfer));
  transfer.set_memory(v1::MEMORY_DISPOSITION_RETURNED);
  EXPECT_TRUE(may_reuse_memory(transfer));
}

TEST(States, MemoryOfATransferThatIsNotOverIsNotReused) {
  v1::Transfer transfer;
  transfer.set_state(unknown<v1::TransferState>());
  transfer.set_memory(v1::MEMORY_DISPOSITION_RETURNED);
  EXPECT_FALSE(may_reuse_memory(transfer));
}

TEST(States, AnUnknownReasonIsNotRetried) {
  v1::Failure failure;
  failure.set_reason(unknown<v1::FailureReason>());
  failure.set_next(v1::NEXT_STEP_RETRY_HERE);
  EXPECT_FALSE(may_retry_here(failure));
  EXPECT_EQ(known_reason(failure.reason()), v1::FAILURE_REASON_INTERNAL);
  failure.set_reason(v1::FAILURE_REASON_QUEUE_TIMEOUT);
  EXPECT_TRUE(may_retry_here(failure));
  EXPECT_FALSE(may_retry_elsewhere(failure));
}

TEST(States, OnlyAnOpenEngineTakesWork) {
  EXPECT_TRUE(takes_work(v1::ADMISSION_OPEN));
  EXPECT_FALSE(takes_work(v1::ADMISSION_UNSPECIFIED));
  EXPECT_FALSE(takes_work(unknown<v1::Admission>()));
}

TEST(States, AnUnknownOutcomeIsInFlight) {
  v1::CancelTransferResponse reply;
  EXPECT_EQ(outcome(reply), v1::CANCEL_OUTCOME_CANCELLED_IN_FLIGHT);
  reply.set_outcome(unknown<v1::CancelOutcome>());
  EXPECT_EQ(outcome(reply), v1::CANCEL_OUTCOME_CANCELLED_IN_FLIGHT);
  reply.set_outcome(v1::CANCEL_OUTCOME_TOMBSTONED);
  EXPECT_EQ(outcome(reply), v1::CANCEL_OUTCOME_TOMBSTONED);
}

TEST(States, NamesHaveNoPrefixAndUnknownValuesTheirNumber) {
  EXPECT_EQ(name_of(v1::FAILURE_REASON_LEASE_EXPIRED), "LEASE_EXPIRED");
  EXPECT_EQ(name_of(unknown<v1::LeaseState>()), "900");
  EXPECT_EQ(name_of(v1::NEXT_STEP_UNSPECIFIED), "");
}

TEST(Values, DurationsGoThereAndBack) {
  constexpr std::int64_t kLong = std::int64_t{1} << 60;
  for (const Nanoseconds value : {Nanoseconds(0), Nanoseconds(1), Nanoseconds(-1'500'000'000), Nanoseconds(kLong)}) {
    EXPECT_EQ(from_duration(to_duration(value)), value);
  }
}

TEST(Values, ADurationThatIsTooLongIsTheLongest) {
  google::protobuf::Duration value;
  value.set_seconds(std::int64_t{1} << 62);
  EXPECT_GT(from_duration(value), std::chrono::hours(24 * 365 * 290));
}

TEST(Values, RunsAreMaximalAndKeepTheOrder) {
  const std::vector<std::uint32_t> ids = {3, 4, 5, 9, 8, 4294967295, 0};
  const auto runs = block_runs(ids);
  EXPECT_EQ(runs.starts_size(), 5);
  EXPECT_EQ(runs.counts(0), 3U);
  EXPECT_EQ(block_ids(runs), ids);
}

TEST(Values, KeysAre128RandomBits) {
  EXPECT_EQ(random_key().size(), 32U);
  EXPECT_NE(random_key(), random_key());
  EXPECT_EQ(random_bytes(16).size(), 16U);
}

}  // namespace
}  // namespace kvgrpc
