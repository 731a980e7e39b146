#pragma once

#include <filesystem>
#include <string>

namespace lowbit::ep {

// SHA-256 (FIPS 180-4) of a file's bytes, in lower-case hexadecimal digits. Throws Error where it cannot be read.
std::string Sha256OfFile(const std::filesystem::path& path);

}  // namespace lowbit::ep
