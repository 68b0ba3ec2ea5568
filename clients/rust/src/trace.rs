//! The W3C trace context of calls.

use tonic::codegen::http::HeaderValue;

/// The key of the trace context in the metadata of a call.
pub(crate) const TRACEPARENT: &str = "traceparent";

/// That of the current span of OpenTelemetry.
#[cfg(feature = "opentelemetry")]
pub(crate) fn current() -> Option<HeaderValue> {
    use opentelemetry::trace::TraceContextExt;

    let context = opentelemetry::Context::current();
    let span = context.span();
    let span = span.span_context();
    if !span.is_valid() {
        return None;
    }
    let flags = span.trace_flags().to_u8();
    HeaderValue::try_from(format!("00-{}-{}-{flags:02x}", span.trace_id(), span.span_id())).ok()
}

/// Without the feature `opentelemetry` a task has no trace context of its own.
#[cfg(not(feature = "opentelemetry"))]
pub(crate) fn current() -> Option<HeaderValue> {
    None
}
