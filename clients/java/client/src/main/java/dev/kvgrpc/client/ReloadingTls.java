package dev.kvgrpc.client;

import io.grpc.ChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.IOException;
import java.net.Socket;
import java.security.GeneralSecurityException;
import java.security.Principal;
import java.security.PrivateKey;
import java.security.cert.CertificateException;
import java.security.cert.X509Certificate;
import javax.net.ssl.SSLEngine;
import javax.net.ssl.X509ExtendedKeyManager;
import javax.net.ssl.X509ExtendedTrustManager;

/**
 * The files of TLS of a channel. They are read again at each handshake, so that a new connection has the files of its
 * moment. Files that became unusable leave the last ones, because who writes them may be half way.
 */
final class ReloadingTls {
  private final TlsFiles files;
  private TlsMaterial last;

  /** Reads the files for the first time. */
  ReloadingTls(TlsFiles files) throws IOException, GeneralSecurityException {
    this.files = files;
    this.last = TlsMaterial.read(files);
  }

  ChannelCredentials credentials() {
    TlsChannelCredentials.Builder builder = TlsChannelCredentials.newBuilder().trustManager(new Trust());
    return (files.cert() == null ? builder : builder.keyManager(new Key())).build();
  }

  private synchronized TlsMaterial look() {
    try {
      last = TlsMaterial.read(files);
    } catch (IOException | GeneralSecurityException | RuntimeException unusable) {
      // The server says when the last ones no longer do.
    }
    return last;
  }

  /** The certificate with its key. It is shown to every server, so that a server that does not know its CA says no. */
  private final class Key extends X509ExtendedKeyManager {
    private TlsMaterial shown;
    private long choices;

    /** Returns the name of what the next two calls ask for. A handshake makes all three in one thread. */
    private synchronized String choose() {
      shown = look();
      choices++;
      return name();
    }

    private synchronized TlsMaterial named(String alias) {
      return alias.equals(name()) ? shown : null;
    }

    private String name() {
      return "client-" + choices;
    }

    @Override
    public String chooseClientAlias(String[] types, Principal[] issuers, Socket socket) {
      return choose();
    }

    @Override
    public String chooseEngineClientAlias(String[] types, Principal[] issuers, SSLEngine engine) {
      return choose();
    }

    /** Returns null after another handshake found other files: this one then fails, and gRPC connects again. */
    @Override
    public X509Certificate[] getCertificateChain(String alias) {
      TlsMaterial found = named(alias);
      return found == null ? null : found.chain();
    }

    @Override
    public PrivateKey getPrivateKey(String alias) {
      TlsMaterial found = named(alias);
      return found == null ? null : found.key();
    }

    @Override
    public String[] getClientAliases(String type, Principal[] issuers) {
      return new String[] {choose()};
    }

    @Override
    public String[] getServerAliases(String type, Principal[] issuers) {
      return null;
    }

    @Override
    public String chooseServerAlias(String type, Principal[] issuers, Socket socket) {
      return null;
    }
  }

  /** The CAs that sign servers. */
  private final class Trust extends X509ExtendedTrustManager {
    @Override
    public void checkServerTrusted(X509Certificate[] chain, String type, SSLEngine engine)
        throws CertificateException {
      look().trust().checkServerTrusted(chain, type, engine);
    }

    @Override
    public void checkServerTrusted(X509Certificate[] chain, String type, Socket socket) throws CertificateException {
      look().trust().checkServerTrusted(chain, type, socket);
    }

    /** Refuses: without the connection nobody compares the server's name. */
    @Override
    public void checkServerTrusted(X509Certificate[] chain, String type) throws CertificateException {
      throw new CertificateException("a server is checked with its connection");
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String type, SSLEngine engine)
        throws CertificateException {
      checkClientTrusted(chain, type);
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String type, Socket socket) throws CertificateException {
      checkClientTrusted(chain, type);
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String type) throws CertificateException {
      throw new CertificateException("this is a client");
    }

    @Override
    public X509Certificate[] getAcceptedIssuers() {
      return new X509Certificate[0];
    }
  }
}
