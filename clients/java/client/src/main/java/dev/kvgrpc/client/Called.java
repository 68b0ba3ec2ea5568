package dev.kvgrpc.client;

import io.grpc.Metadata;
import java.nio.charset.StandardCharsets;

/** The call that an error belongs to. The interceptor adds it to the trailers, which every kind of stub passes on. */
record Called(String method, String address, String idempotencyKey) {
  static final Called NONE = new Called("", "", "");

  private static final Metadata.Key<byte[]> METHOD = key("method");
  private static final Metadata.Key<byte[]> ADDRESS = key("address");
  private static final Metadata.Key<byte[]> IDEMPOTENCY_KEY = key("idempotency-key");

  /** Returns what the trailers have of it. */
  static Called in(Metadata trailers) {
    return trailers == null
        ? NONE
        : new Called(text(trailers, METHOD), text(trailers, ADDRESS), text(trailers, IDEMPOTENCY_KEY));
  }

  void noteIn(Metadata trailers) {
    put(trailers, METHOD, method);
    put(trailers, ADDRESS, address);
    put(trailers, IDEMPOTENCY_KEY, idempotencyKey);
  }

  private static void put(Metadata trailers, Metadata.Key<byte[]> key, String text) {
    trailers.discardAll(key);
    trailers.put(key, text.getBytes(StandardCharsets.UTF_8));
  }

  private static String text(Metadata trailers, Metadata.Key<byte[]> key) {
    byte[] found = trailers.get(key);
    return found == null ? "" : new String(found, StandardCharsets.UTF_8);
  }

  private static Metadata.Key<byte[]> key(String what) {
    return Metadata.Key.of("kvgrpc-called-" + what + "-bin", Metadata.BINARY_BYTE_MARSHALLER);
  }
}
