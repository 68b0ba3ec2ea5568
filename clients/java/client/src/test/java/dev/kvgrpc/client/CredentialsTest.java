package dev.kvgrpc.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Credentials from files: what is refused before a call, and which text shows no secret. */
final class CredentialsTest {
  @TempDir
  private Path folder;

  @Test
  void filesThatAreNotUsableAreRefusedBeforeACall() {
    Path some = folder.resolve("some");
    assertThrows(IllegalArgumentException.class, () -> new TlsFiles(some, some, null));
    assertThrows(IllegalArgumentException.class, () -> new TlsFiles(some, null, some));
    ClientOptions options = ClientOptions.defaults();
    UncheckedIOException missing =
        assertThrows(UncheckedIOException.class, () -> options.withTls(TlsFiles.in(folder)));
    assertEquals(true, missing.getMessage().contains("ca.crt"), missing.getMessage());
  }

  @Test
  void aTokenIsOneWordAndNoTextShowsIt() throws Exception {
    ClientOptions options = ClientOptions.defaults();
    for (String token : new String[] {"", "secret word", "secret\nword", "sécret"}) {
      IllegalArgumentException refused =
          assertThrows(IllegalArgumentException.class, () -> options.withToken(token));
      assertFalse(refused.getMessage().contains("secret"));
    }
    Path file = Files.writeString(folder.resolve("token"), " secret\n");
    assertEquals("secret", options.withTokenFile(file).token().get());
    assertFalse(options.withTokenFile(file).toString().contains("secret"));
    assertFalse(options.withToken("secret").toString().contains("secret"));
  }
}
