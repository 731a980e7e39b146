// The parts of lowbit_node_tests.
#pragma once

namespace lowbit {

void TestNodes();
void TestStandardNodes();

}  // namespace lowbit
