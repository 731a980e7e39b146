// What nodes mean, apart from any kernel: the program links lowbit_nodes alone.
#include "tests/expect.h"
#include "tests/nodes/nodes_test.h"

int main() {
  lowbit::TestNodes();
  lowbit::TestStandardNodes();
  return lowbit::ReportFailures();
}
