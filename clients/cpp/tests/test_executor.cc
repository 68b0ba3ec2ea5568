#include "program.h"
#include "server.h"

namespace kvgrpc::testing {
namespace {

struct Executor : WithServer {
  Program program{EXECUTOR, {}};

  std::string ask(const std::string& request) {
    program.write(request);
    return program.read();
  }
  void connect_it() {
    EXPECT_EQ(ask(R"({"id":"c","op":"connect","server":"P","address":")" + server.address() + "\"}"),
              R"({"id":"c","ok":{}})");
  }
};

TEST_F(Executor, ItSaysWhatItIsAndEndsWithItsInput) {
  EXPECT_NE(ask(R"({"id":1,"op":"hello"})").find(R"({"id":1,"ok":{"language":"cpp")"), std::string::npos);
  EXPECT_EQ(program.end(), 0);
}

TEST_F(Executor, ACallGivesItsReply) {
  server.pools.allocate_blocks = [](auto* context, const auto& request, auto* reply) {
    *reply->mutable_header() = header(3);
    reply->mutable_blocks()->set_allocation_id(metadata_of(*context, "x-a") + std::to_string(
        request.group_block_counts(0).block_count()));
    return Status::OK;
  };
  connect_it();
  EXPECT_EQ(ask(R"({"id":2,"op":"call","server":"P","method":"kvgrpc.v1.PoolService/AllocateBlocks",)"
                R"("metadata":{"x-a":"b"},"request":{"groupBlockCounts":[{"group":0,"blockCount":4294967295}]}})"),
            R"({"id":2,"ok":{"reply":{"header":{"engineId":"P","incarnation":"7","eventSeq":"3"},)"
            R"("blocks":{"allocationId":"b4294967295"}}}})");
}

TEST_F(Executor, AnErrorHasItsFields) {
  server.pools.allocate_blocks = [](auto*, const auto&, auto*) {
    return refusal(StatusCode::OUT_OF_RANGE, "LIMIT_EXCEEDED", {{"next", "FIX_REQUEST"}, {"group", "0"}});
  };
  connect_it();
  const auto answer =
      ask(R"({"id":2,"op":"call","server":"P","method":"kvgrpc.v1.PoolService/AllocateBlocks","request":{}})");
  for (const char* part : {R"("code":"OUT_OF_RANGE")", R"("reason":"LIMIT_EXCEEDED")", R"("next":"FIX_REQUEST")",
                           R"("metadata":{"group":"0"})"}) {
    EXPECT_NE(answer.find(part), std::string::npos) << answer;
  }
  EXPECT_EQ(answer.find("retryDelayS"), std::string::npos);
}

TEST_F(Executor, WhatItCannotDoIsItsOwnError) {
  connect_it();
  EXPECT_EQ(ask(R"({"id":2,"op":"call","server":"P","method":"x/Y","request":{}})"),
            R"({"id":2,"error":{"code":"EXECUTOR","message":"no unary method is called x/Y"}})");
  EXPECT_NE(ask(R"({"id":3,"op":"dance"})").find("EXECUTOR"), std::string::npos);
}

TEST_F(Executor, AStreamIsOpenedWrittenAndReadToItsEnd) {
  server.leases.keep_alive = [](ServerContext* context, auto* stream) {
    context->AddInitialMetadata("x-open", "yes");
    stream->SendInitialMetadata();
    v1::KeepAliveRequest request;
    while (stream->Read(&request)) {
      v1::KeepAliveResponse reply;
      for (int i = 0; i < request.leases_size(); ++i) reply.add_leases()->set_state(static_cast<v1::LeaseState>(900));
      stream->Write(reply);
    }
    return Status::OK;
  };
  connect_it();
  EXPECT_NE(ask(R"({"id":2,"op":"open","server":"P","stream":"s","method":"kvgrpc.v1.LeaseService/KeepAlive"})")
                .find(R"("x-open":"yes")"), std::string::npos);
  EXPECT_EQ(ask(R"({"id":3,"op":"next","stream":"s","timeoutS":0.05})"), R"({"id":3,"ok":{"timeout":true}})");
  EXPECT_EQ(ask(R"({"id":4,"op":"send","stream":"s","request":{"leases":[{"leaseId":"a"}]}})"), R"({"id":4,"ok":{}})");
  EXPECT_EQ(ask(R"({"id":5,"op":"next","stream":"s","timeoutS":9})"),
            R"({"id":5,"ok":{"message":{"leases":[{"state":900}]}}})");
  ask(R"({"id":6,"op":"finish","stream":"s"})");
  EXPECT_EQ(ask(R"({"id":7,"op":"next","stream":"s","timeoutS":9})"), R"({"id":7,"ok":{"end":true}})");
}

TEST_F(Executor, TheWrappersWatchesWaitsAndRenewalsCanBeAsked) {
  server.transfers.watch_transfers = [](auto* context, const auto& request, auto* writer) {
    v1::WatchTransfersResponse message;
    *message.mutable_header() = header(request.after_event_seq() + 1);
    message.mutable_transfer()->set_transfer_id(request.filter().request_id());
    writer->Write(message);
    return until_cancelled(context);
  };
  server.handshakes.watch_engine = [](auto* context, const auto&, auto* writer) {
    writer->Write({});
    return until_cancelled(context);
  };
  server.transfers.wait_transfer = [](auto*, const auto&, auto* reply) {
    reply->set_condition_met(true);
    return Status::OK;
  };
  server.leases.keep_alive = [](auto*, auto* stream) {
    v1::KeepAliveRequest request;
    while (stream->Read(&request)) {
      v1::KeepAliveResponse reply;
      reply.add_leases()->set_state(v1::LEASE_STATE_DONE);
      stream->Write(reply);
    }
    return Status::OK;
  };
  server.transfers.cancel_transfer = [](auto*, const auto& request, auto* reply) {
    reply->set_outcome(v1::CANCEL_OUTCOME_TOMBSTONED);
    const bool good = request.transfer_key() == "0123456789abcdef" && request.free_allocation_ids_size() == 1;
    return good ? Status::OK : refusal(StatusCode::NOT_FOUND, "TRANSFER_NOT_FOUND");
  };
  connect_it();
  ask(R"({"id":1,"op":"watch","server":"P","stream":"w","filter":{"requestId":"r"},)"
      R"("after":{"eventSeq":"4","incarnation":"7"}})");
  EXPECT_EQ(ask(R"({"id":2,"op":"next","stream":"w","timeoutS":9})"),
            R"({"id":2,"ok":{"message":{"header":{"engineId":"P","incarnation":"7","eventSeq":"5"},)"
            R"("transfer":{"transferId":"r"}}}})");
  ask(R"({"id":3,"op":"watchEngine","server":"P","stream":"e"})");
  EXPECT_EQ(ask(R"({"id":4,"op":"next","stream":"e","timeoutS":9})"), R"({"id":4,"ok":{"message":{}}})");
  EXPECT_EQ(ask(R"({"id":5,"op":"wait","server":"P","transferId":"t","until":"ENDED","timeoutS":9})"),
            R"({"id":5,"ok":{"transfer":{},"conditionMet":true}})");
  ask(R"({"id":6,"op":"keepAlive","server":"P","keeper":"k","leases":[{"leaseId":"a"}],"ttlS":3})");
  EXPECT_EQ(ask(R"({"id":7,"op":"kept","keeper":"k","index":0,"timeoutS":9})"), R"({"id":7,"ok":{"state":"DONE"}})");
  EXPECT_EQ(ask(R"({"id":8,"op":"stopKeeping","keeper":"k"})"), R"({"id":8,"ok":{}})");
  EXPECT_EQ(ask(R"({"id":9,"op":"cleanUp","message":"m","sides":[)"
                R"({"server":"P","transferKey":"MDEyMzQ1Njc4OWFiY2RlZg==","freeAllocationIds":["a"]},)"
                R"({"server":"P","transferId":"t"}]})"),
            R"({"id":9,"ok":{"outcomes":["TOMBSTONED","TRANSFER_NOT_FOUND"]}})");
  EXPECT_EQ(ask(R"({"id":10,"op":"close","server":"P"})"), R"({"id":10,"ok":{}})");
}

TEST_F(Executor, ACallThatWaitsDelaysNoOther) {
  server.handshakes.watch_engine = [](auto* context, const auto&, auto*) { return until_cancelled(context); };
  connect_it();
  ask(R"({"id":1,"op":"watchEngine","server":"P","stream":"e"})");
  program.write(R"({"id":2,"op":"next","stream":"e","timeoutS":30})");
  EXPECT_NE(ask(R"({"id":3,"op":"hello"})").find(R"("id":3)"), std::string::npos);
  EXPECT_EQ(ask(R"({"id":4,"op":"cancel","stream":"e"})"), R"({"id":4,"ok":{}})");
  EXPECT_NE(program.read().find(R"({"id":2,"error":{)"), std::string::npos);
}

}  // namespace
}  // namespace kvgrpc::testing
