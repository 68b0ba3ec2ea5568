package dev.kvgrpc.client;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.PublicKey;
import java.security.Signature;
import java.security.cert.CertificateFactory;
import java.security.cert.X509Certificate;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.Arrays;
import java.util.Base64;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.net.ssl.TrustManager;
import javax.net.ssl.TrustManagerFactory;
import javax.net.ssl.X509ExtendedTrustManager;

/** What the files of TLS held at one moment. {@code chain} and {@code key} are null without a certificate. */
record TlsMaterial(X509Certificate[] chain, PrivateKey key, X509ExtendedTrustManager trust) {
  private static final Pattern KEY =
      Pattern.compile("-----BEGIN PRIVATE KEY-----([A-Za-z0-9+/=\\s]+)-----END PRIVATE KEY-----");

  /** Reads the files. Throws for one that is no PEM, and for a key of another certificate. */
  static TlsMaterial read(TlsFiles files) throws IOException, GeneralSecurityException {
    X509ExtendedTrustManager trust = trusting(certificates(files.ca()));
    if (files.cert() == null) {
      return new TlsMaterial(null, null, trust);
    }
    X509Certificate[] chain = certificates(files.cert());
    PublicKey certified = chain[0].getPublicKey();
    PrivateKey key = key(files.key(), certified.getAlgorithm());
    if (!fits(key, certified)) {
      throw new GeneralSecurityException(files.key() + " is not the key of the certificate in " + files.cert());
    }
    return new TlsMaterial(chain, key, trust);
  }

  private static X509Certificate[] certificates(Path path) throws IOException, GeneralSecurityException {
    byte[] content = Files.readAllBytes(path);
    X509Certificate[] found = CertificateFactory.getInstance("X.509")
        .generateCertificates(new ByteArrayInputStream(content))
        .toArray(new X509Certificate[0]);
    if (found.length == 0) {
      throw new GeneralSecurityException(path + " holds no certificate in PEM");
    }
    return found;
  }

  private static PrivateKey key(Path path, String algorithm) throws IOException, GeneralSecurityException {
    Matcher pem = KEY.matcher(new String(Files.readAllBytes(path), StandardCharsets.ISO_8859_1));
    if (!pem.find()) {
      throw new GeneralSecurityException(path + " holds no key in PKCS#8");
    }
    byte[] encoded = Base64.getMimeDecoder().decode(pem.group(1));
    return KeyFactory.getInstance(algorithm).generatePrivate(new PKCS8EncodedKeySpec(encoded));
  }

  private static boolean fits(PrivateKey key, PublicKey certified) throws GeneralSecurityException {
    String algorithm = switch (certified.getAlgorithm()) {
      case "RSA" -> "SHA256withRSA";
      case "EC" -> "SHA256withECDSA";
      default -> certified.getAlgorithm();
    };
    Signature signature = Signature.getInstance(algorithm);
    signature.initSign(key);
    byte[] signed = signature.sign();
    signature.initVerify(certified);
    return signature.verify(signed);
  }

  private static X509ExtendedTrustManager trusting(X509Certificate[] authorities)
      throws IOException, GeneralSecurityException {
    KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
    store.load(null);
    for (int number = 0; number < authorities.length; number++) {
      store.setCertificateEntry("ca-" + number, authorities[number]);
    }
    TrustManagerFactory factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
    factory.init(store);
    return Arrays.stream(factory.getTrustManagers())
        .filter(X509ExtendedTrustManager.class::isInstance)
        .map((TrustManager one) -> (X509ExtendedTrustManager) one)
        .findFirst()
        .orElseThrow(() -> new GeneralSecurityException("this Java checks no certificates of servers"));
  }
}
