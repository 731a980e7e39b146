// File operations that fail, for tests: preloaded, these stand before the C library's. They count what the process
// does below one folder; the operation whose turn it is finds the disk full, cannot read, or is the last thing that
// the process does. (What C's own streams write inside of the C library passes them by; Python and C++ call these.)
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

enum class Does : uint8_t { kWrite, kRead, kRemove };
enum class Fault : int { kNone, kFull, kUnreadable, kKilled };

char g_folder[PATH_MAX];
std::array<std::atomic<bool>, 4096> g_is_below;  // by file descriptor
std::atomic<int64_t> g_seen{0}, g_turn{0};
std::atomic<int> g_fault{0};

template <typename Function>
Function Real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static const auto real = Real<decltype(&name)>(#name)

bool IsBelow(const char* path) {
  return g_folder[0] != '\0' && path != nullptr && std::strncmp(path, g_folder, std::strlen(g_folder)) == 0;
}
bool IsBelow(int file) {
  return file >= 0 && static_cast<size_t>(file) < g_is_below.size() && g_is_below[static_cast<size_t>(file)];
}

// What is relative to an open folder (rmtree) is below where the folder is.
bool IsBelow(int folder, const char* path) {
  return path != nullptr && path[0] != '/' && folder != AT_FDCWD ? IsBelow(folder) : IsBelow(path);
}

// Whether the operation fails. A full disk stays full, and may still be read and cleared; one place cannot be read.
bool Fails(bool is_below, Does does) {
  const auto fault = static_cast<Fault>(g_fault.load());
  if (!is_below || fault == Fault::kNone) return false;
  if (fault == Fault::kFull && does != Does::kWrite) return false;
  if (fault == Fault::kUnreadable && does != Does::kRead) return false;
  const int64_t number = g_seen.fetch_add(1) + 1, turn = g_turn.load();
  if (turn == 0 || number < turn || (fault == Fault::kUnreadable && number != turn)) return false;
  if (fault == Fault::kKilled) kill(getpid(), SIGKILL);
  errno = fault == Fault::kFull ? ENOSPC : EIO;
  return true;
}

void Remember(int file, bool is_below) {
  if (file >= 0 && static_cast<size_t>(file) < g_is_below.size())
    g_is_below[static_cast<size_t>(file)] = is_below;
}

template <typename Open>
int Opened(bool is_below, int flags, Open open) {
  const bool writes = (flags & (O_WRONLY | O_RDWR | O_CREAT)) != 0;
  const bool is_folder = (flags & O_DIRECTORY) != 0;  // looked into, or cleared
  if (Fails(is_below && !is_folder, writes ? Does::kWrite : Does::kRead)) return -1;
  const int file = open();
  Remember(file, is_below);
  return file;
}

mode_t Mode(int flags, va_list more) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? static_cast<mode_t>(va_arg(more, int)) : 0;
}

}  // namespace

extern "C" {

#define OPEN(name)                                                                \
  int name(const char* path, int flags, ...) {                                    \
    REAL(name);                                                                   \
    va_list more;                                                                 \
    va_start(more, flags);                                                        \
    const mode_t mode = Mode(flags, more);                                        \
    va_end(more);                                                                 \
    return Opened(IsBelow(path), flags, [&] { return real(path, flags, mode); }); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                              \
  int name(int folder, const char* path, int flags, ...) {                                        \
    REAL(name);                                                                                   \
    va_list more;                                                                                 \
    va_start(more, flags);                                                                        \
    const mode_t mode = Mode(flags, more);                                                        \
    va_end(more);                                                                                 \
    return Opened(IsBelow(folder, path), flags, [&] { return real(folder, path, flags, mode); }); \
  }
OPENAT(openat)
OPENAT(openat64)

FILE* fopen(const char* path, const char* mode) {
  REAL(fopen);
  if (Fails(IsBelow(path), std::strpbrk(mode, "wa+") != nullptr ? Does::kWrite : Does::kRead)) return nullptr;
  FILE* stream = real(path, mode);
  if (stream != nullptr) Remember(fileno(stream), IsBelow(path));
  return stream;
}
FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }

size_t fwrite(const void* data, size_t size, size_t count, FILE* stream) {
  REAL(fwrite);
  return Fails(IsBelow(fileno(stream)), Does::kWrite) ? 0 : real(data, size, count, stream);
}
int fflush(FILE* stream) {
  REAL(fflush);
  return stream != nullptr && Fails(IsBelow(fileno(stream)), Does::kWrite) ? EOF : real(stream);
}

ssize_t write(int file, const void* data, size_t size) {
  REAL(write);
  return Fails(IsBelow(file), Does::kWrite) ? -1 : real(file, data, size);
}
ssize_t writev(int file, const iovec* parts, int count) {
  REAL(writev);
  return Fails(IsBelow(file), Does::kWrite) ? -1 : real(file, parts, count);
}
ssize_t pwrite(int file, const void* data, size_t size, off_t at) {
  REAL(pwrite);
  return Fails(IsBelow(file), Does::kWrite) ? -1 : real(file, data, size, at);
}
ssize_t pwrite64(int file, const void* data, size_t size, off64_t at) {
  REAL(pwrite64);
  return Fails(IsBelow(file), Does::kWrite) ? -1 : real(file, data, size, at);
}
int ftruncate(int file, off_t size) noexcept {
  REAL(ftruncate);
  return Fails(IsBelow(file), Does::kWrite) ? -1 : real(file, size);
}
int ftruncate64(int file, off64_t size) noexcept {
  REAL(ftruncate64);
  return Fails(IsBelow(file), Does::kWrite) ? -1 : real(file, size);
}
int fsync(int file) {
  REAL(fsync);
  return Fails(IsBelow(file), Does::kWrite) ? -1 : real(file);
}

ssize_t read(int file, void* data, size_t size) {
  REAL(read);
  return Fails(IsBelow(file), Does::kRead) ? -1 : real(file, data, size);
}
ssize_t readv(int file, const iovec* parts, int count) {
  REAL(readv);
  return Fails(IsBelow(file), Does::kRead) ? -1 : real(file, parts, count);
}
ssize_t pread(int file, void* data, size_t size, off_t at) {
  REAL(pread);
  return Fails(IsBelow(file), Does::kRead) ? -1 : real(file, data, size, at);
}
ssize_t pread64(int file, void* data, size_t size, off64_t at) {
  REAL(pread64);
  return Fails(IsBelow(file), Does::kRead) ? -1 : real(file, data, size, at);
}

int close(int file) {
  REAL(close);
  Remember(file, false);
  return real(file);
}

int rename(const char* from, const char* to) noexcept {
  REAL(rename);
  return Fails(IsBelow(from) || IsBelow(to), Does::kWrite) ? -1 : real(from, to);
}
int link(const char* from, const char* to) noexcept {
  REAL(link);
  return Fails(IsBelow(from) || IsBelow(to), Does::kWrite) ? -1 : real(from, to);
}
int mkdir(const char* path, mode_t mode) noexcept {
  REAL(mkdir);
  return Fails(IsBelow(path), Does::kWrite) ? -1 : real(path, mode);
}
int unlink(const char* path) noexcept {
  REAL(unlink);
  return Fails(IsBelow(path), Does::kRemove) ? -1 : real(path);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  REAL(unlinkat);
  return Fails(IsBelow(folder, path), Does::kRemove) ? -1 : real(folder, path, flags);
}
int rmdir(const char* path) noexcept {
  REAL(rmdir);
  return Fails(IsBelow(path), Does::kRemove) ? -1 : real(path);
}

// From here on operations below `folder` are counted, and the `turn`th (0: none) meets the fault: 1 the disk is full
// from then on, 2 it cannot read, 3 the process is killed.
void LowBitFaultsFiles(const char* folder, int fault, int64_t turn) {
  std::snprintf(g_folder, sizeof g_folder, "%s", folder);
  g_seen.store(0);
  g_turn.store(turn);
  g_fault.store(fault);
}

// How many operations there were that could have met the fault.
int64_t LowBitFaultsFilesSeen() { return g_seen.load(); }

}  // extern "C"
