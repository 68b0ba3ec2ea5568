#include <kvgrpc/kvgrpc.h>

int main() {
  const auto client = kvgrpc::connect("127.0.0.1:1");
  return client.address().empty() || kvgrpc::takes_work(kvgrpc::v1::ADMISSION_DRAINING);
}
