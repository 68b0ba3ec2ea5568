package dev.kvgrpc.client;

import io.opentelemetry.api.trace.Span;
import io.opentelemetry.api.trace.SpanContext;
import java.util.function.Supplier;

/**
 * Returns the context of OpenTelemetry's current span, for {@link ClientOptions#withTraceparent}. It needs {@code
 * io.opentelemetry:opentelemetry-api}, which this library does not bring.
 */
public final class OpenTelemetryTraceparent implements Supplier<String> {
  /** Returns an empty text outside of any span. */
  @Override
  public String get() {
    SpanContext span = Span.current().getSpanContext();
    return span.isValid()
        ? "00-" + span.getTraceId() + "-" + span.getSpanId() + "-" + span.getTraceFlags().asHex()
        : "";
  }
}
