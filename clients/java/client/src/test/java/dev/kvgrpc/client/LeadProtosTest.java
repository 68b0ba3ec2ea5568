package dev.kvgrpc.client;

import static org.junit.jupiter.api.Assertions.assertFalse;

import com.google.protobuf.Descriptors.Descriptor;
import dev.kvgrpc.peer.v1.ConnectRankRequest;
import dev.kvgrpc.peer.v1.OpenAccessRequest;
import dev.kvgrpc.session.v1.ClientFrame;
import dev.kvgrpc.session.v1.RankCommand;
import java.util.List;
import org.junit.jupiter.api.Test;

/**
 * Tests that the packages for leads, which are not part of the library, compile beside it: no name is generated twice.
 */
class LeadProtosTest {
  @Test
  void everyFileForLeadsIsMadeIntoClasses() {
    List<Descriptor> oneOfEachFile = List.of(
        OpenAccessRequest.getDescriptor(),
        ConnectRankRequest.getDescriptor(),
        ClientFrame.getDescriptor(),
        RankCommand.getDescriptor());
    oneOfEachFile.forEach(message -> assertFalse(message.getFields().isEmpty()));
  }
}
