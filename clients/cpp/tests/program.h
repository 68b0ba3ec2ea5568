// A program of this project as a child process, with pipes to its input and from its output.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvgrpc::testing {

class Program {
 public:
  Program(const std::string& path, std::initializer_list<std::string> arguments) {
    int to[2], from[2];
    if (pipe(to) || pipe(from)) throw std::runtime_error("no pipe");
    std::vector<char*> argv = {const_cast<char*>(path.c_str())};
    for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    child_ = fork();
    if (child_ == 0) {
      dup2(to[0], STDIN_FILENO);
      dup2(from[1], STDOUT_FILENO);
      for (const int descriptor : {to[0], to[1], from[0], from[1]}) close(descriptor);
      execv(path.c_str(), argv.data());
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    input_ = fdopen(to[1], "w");
    output_ = fdopen(from[0], "r");
  }
  ~Program() {
    end();
    fclose(output_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void write(const std::string& line) {
    fputs((line + "\n").c_str(), input_);
    fflush(input_);
  }
  // Returns the next line, or an empty text at the end of the output.
  std::string read() {
    std::string line;
    for (int byte = 0; (byte = fgetc(output_)) != EOF && byte != '\n';) line += static_cast<char>(byte);
    return line;
  }
  // Ends the input, and returns the exit status.
  int end() {
    if (input_) {
      fclose(input_);
      input_ = nullptr;
      waitpid(child_, &status_, 0);
    }
    return WEXITSTATUS(status_);
  }

 private:
  pid_t child_ = 0;
  int status_ = 0;
  FILE* input_ = nullptr;
  FILE* output_ = nullptr;
};

}  // namespace kvgrpc::testing
