//! The W3C trace context of calls.

use tonic::codegen::http::HeaderValue;

/// The key of the trace context in the metadata of a call.
pub(crate) const TRACEPARENT: &str = "traceparent";

/// Returns the trace context of OpenTelemetry's current span.
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

/// Returns None: without the feature `opentelemetry` a task has no trace context.
#[cfg(not(feature = "opentelemetry"))]
pub(crate) fn current() -> Option<HeaderValue> {
    None
}

#[cfg(all(test, feature = "opentelemetry"))]
mod tests {
    use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
    use opentelemetry::{Context, ContextGuard};

    fn entered(trace: u128, span: u64) -> ContextGuard {
        let (trace, span) = (TraceId::from(trace), SpanId::from(span));
        let span = SpanContext::new(trace, span, TraceFlags::SAMPLED, true, TraceState::NONE);
        Context::new().with_remote_span_context(span).attach()
    }

    #[test]
    fn the_current_span_is_the_trace_context_and_without_one_there_is_none() {
        assert_eq!(super::current(), None);
        let _entered = entered(0xab, 0xcd);
        let expected = "00-000000000000000000000000000000ab-00000000000000cd-01";
        assert_eq!(super::current().unwrap(), expected);
    }
}
