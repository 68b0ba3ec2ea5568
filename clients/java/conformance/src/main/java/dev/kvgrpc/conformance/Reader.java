package dev.kvgrpc.conformance;

import com.google.gson.JsonObject;
import com.google.protobuf.Message;
import dev.kvgrpc.client.EngineWatch;
import dev.kvgrpc.client.MessageStream;
import dev.kvgrpc.client.TransferWatch;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeoutException;

/** A stream that the runner reads by name: a plain call, or one of the wrapper's watches. */
interface Reader extends AutoCloseable {
  /** Returns the answer of {@code next}. */
  JsonObject next(Duration timeout);

  @Override
  void close();

  /** A plain stream. */
  record Plain(MessageStream<Message, Message> stream) implements Reader {
    @Override
    public synchronized JsonObject next(Duration timeout) {
      try {
        Message message = stream.next(timeout);
        return message == null ? flag("end") : of(Optional.of(message));
      } catch (TimeoutException none) {
        return of(Optional.empty());
      }
    }

    @Override
    public void close() {
      stream.close();
    }
  }

  /** The wrapper's watch of transfers. */
  record Transfers(TransferWatch watch) implements Reader {
    @Override
    public synchronized JsonObject next(Duration timeout) {
      return of(watch.next(timeout));
    }

    @Override
    public void close() {
      watch.close();
    }
  }

  /** The wrapper's watch of the engine. Outages are not messages. */
  record Engine(EngineWatch watch) implements Reader {
    @Override
    public synchronized JsonObject next(Duration timeout) {
      long until = System.nanoTime() + timeout.toNanos();
      while (true) {
        Optional<EngineWatch.News> news = watch.next(Duration.ofNanos(until - System.nanoTime()));
        if (news.isEmpty()) {
          return of(Optional.empty());
        }
        if (news.get() instanceof EngineWatch.Status status) {
          return of(Optional.of(status.message()));
        }
      }
    }

    @Override
    public void close() {
      watch.close();
    }
  }

  private static JsonObject of(Optional<? extends Message> message) {
    if (message.isEmpty()) {
      return flag("timeout");
    }
    JsonObject answer = new JsonObject();
    answer.add("message", Methods.json(message.get()));
    return answer;
  }

  private static JsonObject flag(String name) {
    JsonObject answer = new JsonObject();
    answer.addProperty(name, true);
    return answer;
  }
}
