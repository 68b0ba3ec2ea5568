package dev.kvgrpc.client;

import java.time.Duration;

/** Conversions between the durations of the schema and those of Java. */
public final class Durations {
  private Durations() {}

  /** Returns a duration for a field of a request. */
  public static com.google.protobuf.Duration toProto(Duration duration) {
    return com.google.protobuf.Duration.newBuilder()
        .setSeconds(duration.getSeconds())
        .setNanos(duration.getNano())
        .build();
  }

  /** Returns the duration of a field of a reply. */
  public static Duration toJava(com.google.protobuf.Duration duration) {
    return Duration.ofSeconds(duration.getSeconds(), duration.getNanos());
  }

  /** Returns nanoseconds for a wait. They are never negative, and a longer duration counts as 100 years. */
  static long nanos(Duration duration) {
    Duration longest = Duration.ofDays(36_500);
    if (duration.isNegative()) {
      return 0;
    }
    return duration.compareTo(longest) > 0 ? longest.toNanos() : duration.toNanos();
  }
}
