package dev.kvgrpc.client;

import io.grpc.ChannelCredentials;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Path;
import java.security.GeneralSecurityException;

/**
 * Paths of PEM files for TLS. With {@code ca} alone the client checks the server and shows no certificate.
 *
 * @param cert path of the client's certificate chain; null for none
 * @param key path of the client's key, in PKCS#8; null for none
 * @param ca path of the CAs that sign servers
 */
public record TlsFiles(Path cert, Path key, Path ca) {

  /** Checks that there are CAs, and a key where there is a certificate. */
  public TlsFiles {
    if (ca == null) {
      throw new IllegalArgumentException("the CAs that sign servers have no path");
    }
    if ((cert == null) != (key == null)) {
      throw new IllegalArgumentException("a certificate and its key need a path each");
    }
  }

  /** Returns the files of a folder: tls.crt, tls.key and ca.crt, as Kubernetes and cert-manager name them. */
  public static TlsFiles in(Path folder) {
    return new TlsFiles(folder.resolve("tls.crt"), folder.resolve("tls.key"), folder.resolve("ca.crt"));
  }

  /** Returns the same files, but for another certificate and its key. */
  public TlsFiles withCertificate(Path cert, Path key) {
    return new TlsFiles(cert, key, ca);
  }

  /** Returns the same files, but for other CAs. */
  public TlsFiles withCa(Path ca) {
    return new TlsFiles(cert, key, ca);
  }

  /**
   * Returns the credentials of a channel. The files are read again at each handshake, so that a new connection has the
   * files of its moment. Files that became unusable leave the last ones.
   *
   * @throws UncheckedIOException if a file cannot be read
   * @throws IllegalArgumentException for a file that is no PEM, and for a key of another certificate
   */
  public ChannelCredentials credentials() {
    try {
      return new ReloadingTls(this).credentials();
    } catch (IOException unreadable) {
      throw new UncheckedIOException("a file of TLS cannot be read: " + unreadable.getMessage(), unreadable);
    } catch (GeneralSecurityException unusable) {
      throw new IllegalArgumentException("the files of TLS do not do: " + unusable.getMessage(), unusable);
    }
  }
}
