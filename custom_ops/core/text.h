// Text of messages, put together without streams: those bring locales along, half a megabyte of every library
// that holds its own libstdc++, and code at every place that makes a message.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

namespace lowbit {

// A shape on its way into a message: [1, 28, 28]. It becomes text only when the message is made; shapes are
// checked at every call, and the arguments of Require are computed always.
class ShapeText {
 public:
  explicit ShapeText(std::span<const int64_t> shape) : shape_(shape) {}
  std::span<const int64_t> shape() const { return shape_; }

 private:
  std::span<const int64_t> shape_;
};

// One argument of a message. Refers to texts and shapes, so it lives no longer than the expression it stands
// in.
class TextPiece {
 public:
  explicit TextPiece(std::string_view text) : kind_(Kind::kText), text_(text) {}
  explicit TextPiece(char letter) : kind_(Kind::kLetter), letter_(letter) {}
  explicit TextPiece(double number) : kind_(Kind::kReal), real_(number) {}
  explicit TextPiece(ShapeText shape) : kind_(Kind::kShape), shape_(shape.shape()) {}
  template <std::signed_integral T>
  explicit TextPiece(T number) : kind_(Kind::kSigned), signed_(number) {}
  template <std::unsigned_integral T>
  explicit TextPiece(T number) : kind_(Kind::kUnsigned), unsigned_(number) {}

  void AppendTo(std::string& out) const {
    switch (kind_) {
      case Kind::kText:
        out += text_;
        break;
      case Kind::kLetter:
        out += letter_;
        break;
      case Kind::kSigned:
        AppendInteger(out, signed_);
        break;
      case Kind::kUnsigned:
        AppendInteger(out, unsigned_);
        break;
      case Kind::kReal: {
        char digits[32];
        out.append(digits, static_cast<size_t>(std::snprintf(digits, sizeof digits, "%g", real_)));
        break;
      }
      case Kind::kShape:
        out += '[';
        for (size_t i = 0; i < shape_.size(); ++i) {
          if (i != 0) out += ", ";
          AppendInteger(out, shape_[i]);
        }
        out += ']';
        break;
    }
  }

 private:
  enum class Kind : uint8_t { kText, kLetter, kSigned, kUnsigned, kReal, kShape };

  template <typename T>
  static void AppendInteger(std::string& out, T number) {
    char digits[24];
    out.append(digits, std::to_chars(digits, std::end(digits), number).ptr);
  }

  Kind kind_;
  union {
    std::string_view text_;
    char letter_;
    int64_t signed_;
    uint64_t unsigned_;
    double real_;
    std::span<const int64_t> shape_;
  };
};

// Out of line: every message is made by this one function, and a place that may make one only lists its
// arguments.
[[gnu::noinline]] inline void AppendPieces(std::string& out, std::initializer_list<TextPiece> pieces) {
  for (const TextPiece& piece : pieces) piece.AppendTo(out);
}

template <typename... Args>
void AppendText(std::string& out, const Args&... args) {
  AppendPieces(out, {TextPiece(args)...});
}

}  // namespace lowbit
