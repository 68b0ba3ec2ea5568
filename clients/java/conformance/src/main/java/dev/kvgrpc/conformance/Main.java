package dev.kvgrpc.conformance;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/**
 * Reads one request a line from standard input, and writes one answer a line to standard output, each independently.
 */
public final class Main {
  private Main() {}

  /** Runs the executor. It exits with status 0 when its input ends. */
  public static void main(String[] args) throws IOException, InterruptedException {
    PrintStream output = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    System.setOut(System.err); // no library's print may come between the answers
    run(new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)), output);
    System.exit(0); // nobody waits for the calls that are left
  }

  static void run(BufferedReader input, PrintStream output) throws IOException, InterruptedException {
    Executor executor = new Executor();
    ExecutorService threads = Executors.newCachedThreadPool();
    for (String line = input.readLine(); line != null; line = input.readLine()) {
      String request = line;
      threads.execute(() -> write(output, executor.answer(request)));
    }
    threads.shutdown();
    threads.awaitTermination(1, TimeUnit.SECONDS); // for answers that are under way
  }

  private static void write(PrintStream output, String answer) {
    synchronized (output) {
      output.println(answer);
      output.flush();
    }
  }
}
