package dev.kvgrpc.client;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.function.Supplier;

/** A token of a file, which is read again while the client lives. Its text does not show it. */
final class BearerToken implements Supplier<String> {
  /** Time between two looks at the file. */
  private static final Duration LOOK = Duration.ofSeconds(1);

  private final Path file;
  private String token;
  private long lookedAt = System.nanoTime();

  BearerToken(Path file) {
    this.file = file;
    try {
      this.token = read();
    } catch (IOException missing) {
      throw new UncheckedIOException("cannot read " + file, missing);
    }
  }

  /**
   * Returns the token of a call that is made now. A file that became unusable leaves the last token, because who writes
   * the file may be half way.
   */
  @Override
  public synchronized String get() {
    if (System.nanoTime() - lookedAt >= LOOK.toNanos()) {
      lookedAt = System.nanoTime();
      try {
        token = read();
      } catch (IOException | IllegalArgumentException unusable) {
        return token;
      }
    }
    return token;
  }

  /** Returns the token if a call can carry it. */
  static String checked(String token) {
    if (token.isEmpty() || !token.chars().allMatch(character -> character > ' ' && character <= '~')) {
      throw new IllegalArgumentException("a token is one word of printable ASCII");
    }
    return token;
  }

  private String read() throws IOException {
    return checked(Files.readString(file, StandardCharsets.ISO_8859_1).trim());
  }
}
