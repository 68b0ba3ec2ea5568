package dev.kvgrpc.conformance;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.Any;
import com.google.rpc.ErrorInfo;
import dev.kvgrpc.v1.GetTransferRequest;
import dev.kvgrpc.v1.GetTransferResponse;
import dev.kvgrpc.v1.KeepAliveRequest;
import dev.kvgrpc.v1.KeepAliveResponse;
import dev.kvgrpc.v1.LeaseServiceGrpc.LeaseServiceImplBase;
import dev.kvgrpc.v1.LeaseState;
import dev.kvgrpc.v1.RenewedLease;
import dev.kvgrpc.v1.Transfer;
import dev.kvgrpc.v1.TransferServiceGrpc.TransferServiceImplBase;
import dev.kvgrpc.v1.WatchTransfersRequest;
import dev.kvgrpc.v1.WatchTransfersResponse;
import io.grpc.ForwardingServerCall.SimpleForwardingServerCall;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.io.StringReader;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** Tests that the executor returns what the wrapper returns, in the form of the runner. */
class ExecutorTest {
  private final Executor executor = new Executor();
  private Server server;

  @BeforeEach
  void serve() throws IOException {
    server = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", 0))
        .addService(new Transfers())
        .addService(new Leases())
        .intercept(new HeadersFirst())
        .build()
        .start();
    ok("{'op':'connect','server':'P','address':'127.0.0.1:" + server.getPort() + "'}");
  }

  @AfterEach
  void close() {
    ok("{'op':'close','server':'P'}");
    server.shutdownNow();
  }

  @Test
  void anAnswerHasItsRequestsId() throws Exception {
    ByteArrayOutputStream written = new ByteArrayOutputStream();
    Main.run(
        new BufferedReader(new StringReader("{\"id\":7,\"op\":\"hello\"}\n")),
        new PrintStream(written, true, StandardCharsets.UTF_8));
    JsonObject answer = JsonParser.parseString(written.toString(StandardCharsets.UTF_8)).getAsJsonObject();
    assertEquals(7, answer.get("id").getAsInt());
    assertEquals("java", answer.getAsJsonObject("ok").get("language").getAsString());
  }

  @Test
  void enumValuesThatAreUnknownAreNumbers() {
    JsonObject ok = ok("{'op':'call','server':'P','method':'kvgrpc.v1.TransferService/GetTransfer',"
        + "'request':{'transferId':'newer'}}");
    JsonObject transfer = ok.getAsJsonObject("reply").getAsJsonObject("transfer");
    assertEquals(77, transfer.get("state").getAsInt());
  }

  @Test
  void aTypedErrorIsAllThere() {
    JsonObject error = answer("{'op':'call','server':'P','method':'kvgrpc.v1.TransferService/GetTransfer',"
        + "'request':{'transferId':'gone'}}").getAsJsonObject("error");
    assertEquals("NOT_FOUND", error.get("code").getAsString());
    assertEquals("TRANSFER_NOT_FOUND", error.get("reason").getAsString());
    assertEquals("RECOMPUTE", error.get("next").getAsString());
    assertEquals("gone", error.get("message").getAsString());
    assertEquals("P", error.get("engineId").getAsString());
    assertEquals("1234", error.get("incarnation").getAsString());
    assertFalse(error.has("retryDelayS"));
  }

  @Test
  void whatTheExecutorCannotDoIsItsOwnError() {
    JsonObject error = answer("{'op':'call','server':'P','method':'kvgrpc.v1.No/Such'}").getAsJsonObject("error");
    assertEquals("EXECUTOR", error.get("code").getAsString());
  }

  @Test
  void aStreamIsReadMessageByMessageToItsEnd() {
    ok("{'op':'open','server':'P','stream':'s','method':'kvgrpc.v1.TransferService/WatchTransfers','request':{}}");
    String next = "{'op':'next','stream':'s','timeoutS':20}";
    assertEquals("a", ok(next).getAsJsonObject("message").getAsJsonObject("transfer").get("transferId").getAsString());
    assertTrue(ok(next).get("end").getAsBoolean());
  }

  @Test
  void aStreamOfTheClientsIsSentMessageByMessage() {
    ok("{'op':'open','server':'P','stream':'k','method':'kvgrpc.v1.LeaseService/KeepAlive'}");
    assertTrue(ok("{'op':'next','stream':'k','timeoutS':0.01}").get("timeout").getAsBoolean());
    ok("{'op':'send','stream':'k','request':{'leases':[{'leaseId':'a'}]}}");
    JsonObject message = ok("{'op':'next','stream':'k','timeoutS':20}").getAsJsonObject("message");
    assertEquals(1, message.getAsJsonArray("leases").size());
    ok("{'op':'finish','stream':'k'}");
    assertTrue(ok("{'op':'next','stream':'k','timeoutS':20}").get("end").getAsBoolean());
  }

  @Test
  void aLeaseThatIsOverIsTold() {
    ok("{'op':'keepAlive','server':'P','keeper':'k','leases':[{'leaseId':'a'}]}");
    assertEquals("DONE", ok("{'op':'kept','keeper':'k','index':0,'timeoutS':20}").get("state").getAsString());
    ok("{'op':'stopKeeping','keeper':'k'}");
  }

  private JsonObject answer(String request) {
    return JsonParser.parseString(executor.answer(request.replace('\'', '"'))).getAsJsonObject();
  }

  private JsonObject ok(String request) {
    JsonObject answer = answer(request);
    assertTrue(answer.has("ok"), answer::toString);
    return answer.getAsJsonObject("ok");
  }

  /** Sends the initial metadata at once, as kvgrpc does: a stream is open before its first message. */
  private static final class HeadersFirst implements ServerInterceptor {
    @Override
    public <Q, R> ServerCall.Listener<Q> interceptCall(
        ServerCall<Q, R> call, Metadata headers, ServerCallHandler<Q, R> next) {
      call.sendHeaders(new Metadata());
      return next.startCall(new SimpleForwardingServerCall<>(call) {
        @Override
        public void sendHeaders(Metadata again) {}
      }, headers);
    }
  }

  private static final class Transfers extends TransferServiceImplBase {
    @Override
    public void getTransfer(GetTransferRequest request, StreamObserver<GetTransferResponse> caller) {
      if (request.getTransferId().equals("gone")) {
        ErrorInfo info = ErrorInfo.newBuilder()
            .setDomain("kvgrpc.dev")
            .setReason("TRANSFER_NOT_FOUND")
            .putMetadata("next", "RECOMPUTE")
            .putMetadata("engine_id", "P")
            .putMetadata("incarnation", "1234")
            .build();
        caller.onError(StatusProto.toStatusRuntimeException(
            com.google.rpc.Status.newBuilder().setCode(5).setMessage("gone").addDetails(Any.pack(info)).build()));
        return;
      }
      caller.onNext(GetTransferResponse.newBuilder().setTransfer(Transfer.newBuilder().setStateValue(77)).build());
      caller.onCompleted();
    }

    @Override
    public void watchTransfers(WatchTransfersRequest request, StreamObserver<WatchTransfersResponse> caller) {
      caller.onNext(
          WatchTransfersResponse.newBuilder().setTransfer(Transfer.newBuilder().setTransferId("a")).build());
      caller.onCompleted();
    }
  }

  private static final class Leases extends LeaseServiceImplBase {
    @Override
    public StreamObserver<KeepAliveRequest> keepAlive(StreamObserver<KeepAliveResponse> caller) {
      return new StreamObserver<>() {
        @Override
        public void onNext(KeepAliveRequest request) {
          RenewedLease done = RenewedLease.newBuilder().setState(LeaseState.LEASE_STATE_DONE).build();
          caller.onNext(KeepAliveResponse.newBuilder().addLeases(done).build());
        }

        @Override
        public void onError(Throwable cancelled) {}

        @Override
        public void onCompleted() {
          caller.onCompleted();
        }
      };
    }
  }
}
