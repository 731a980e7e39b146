// What kernels are chosen by: a GPU as numbers.
#pragma once

#include <string>
#include <vector>

namespace lowbit::cuda {

// So much of a block's shared memory stays for what a kernel has of fixed size: with more the driver refuses to launch
// it, as PrepareKernel asks for all the rest.
inline constexpr int kFixedSharedBytes = 4096;

struct Device {
  int ordinal = 0;  // -1: a GPU that is not there
  // 10 * major + minor, 90 on Hopper. That of the code that runs there, which is what kernels are chosen by.
  int capability = 0;
  int hardware = 0;  // that of the GPU itself
  int multiprocessors = 0;
  int shared_bytes = 0;  // largest dynamic shared memory of a block
  std::string name;

  // Throws Error where there is no such GPU, one below compute capability 7.5, or one that this build has no
  // code for.
  static Device Query(int ordinal);

  // A GPU that is not there, for which nodes are packed to run elsewhere: their constants stay on the host, and
  // nothing is launched. Throws Error for an architecture that this build has no code for, or that it does not know.
  static Device Absent(int architecture, int multiprocessors);
  bool IsAbsent() const { return ordinal < 0; }
  // Those that Absent takes.
  static std::vector<int> Architectures();
};

}  // namespace lowbit::cuda
