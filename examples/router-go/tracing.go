package main

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"kvgrpc.dev/kvgrpc"
	pb "kvgrpc.dev/kvgrpc/gen/kvgrpc/v1"
)

// w3c propagates a trace as a traceparent, in HTTP headers and in gRPC metadata.
var w3c propagation.TraceContext

// startTracing exports spans where the environment names a collector. Without a collector each request still has a
// trace, and engines and leads get its id, because they may export their spans.
func startTracing(ctx context.Context) (flush func(), err error) {
	about, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "kvgrpc-router")),
		resource.WithTelemetrySDK(),
		resource.WithFromEnv(), // the last option wins: OTEL_SERVICE_NAME
	)
	if err != nil {
		return nil, err
	}
	options := []sdk.TracerProviderOption{sdk.WithResource(about)}
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != "" {
		exporter, err := otlptracegrpc.New(ctx)
		if err != nil {
			return nil, err
		}
		options = append(options, sdk.WithBatcher(exporter))
	}
	provider := sdk.NewTracerProvider(options...)
	otel.SetTracerProvider(provider)
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			slog.Warn("spans are lost", "error", err)
		}
	}, nil
}

func tracer() trace.Tracer { return otel.Tracer("kvgrpc.dev/kvgrpc/examples/router") }

// traceparent returns the W3C traceparent of a context, "" where the context has no trace.
func traceparent(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	w3c.Inject(ctx, carrier)
	return carrier.Get("traceparent")
}

// startRequest starts the span of a request, in the client's trace if there is one.
func startRequest(from *http.Request, id string) (context.Context, trace.Span) {
	ctx := w3c.Extract(from.Context(), propagation.HeaderCarrier(from.Header))
	return tracer().Start(ctx, from.Method+" "+from.URL.Path, trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("kvgrpc.request_id", id)))
}

// startStep starts the span of one step at an engine.
func startStep(ctx context.Context, name string, e *engine) (context.Context, trace.Span) {
	return tracer().Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
		attribute.String("kvgrpc.lead", e.lead), attribute.String("kvgrpc.role", string(e.role))))
}

func endStep(span trace.Span, err error) {
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}

// observe records the state of a step's transfer in the step's span.
func observe(ctx context.Context, transfer *pb.Transfer) {
	if transfer == nil {
		return
	}
	span := trace.SpanFromContext(ctx)
	span.SetAttributes(
		attribute.String("kvgrpc.transfer_id", transfer.TransferId),
		attribute.String("kvgrpc.state", transfer.State.String()),
		attribute.Int64("kvgrpc.bytes", int64(transfer.MovedBytes)),
		attribute.Int("kvgrpc.blocks", int(transfer.BlockCount)),
	)
	if failure := transfer.Failure; failure != nil && !kvgrpc.Succeeded(transfer) {
		span.SetAttributes(attribute.String("kvgrpc.reason", failure.Reason.String()))
	}
}
