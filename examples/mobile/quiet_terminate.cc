// For apps that hold libstdc++ themselves (-static-libstdc++): its terminate handler prints the name of the
// exception that nobody caught, and brings a demangler of 47 KB along to do so. This one ends the program
// without a word, and the linker leaves the other and the demangler out.
#include <cstdlib>

namespace __gnu_cxx {

[[noreturn]] void __verbose_terminate_handler() { std::abort(); }

}  // namespace __gnu_cxx
