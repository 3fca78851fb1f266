#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <sstream>
#include <string>

namespace kvtier::testing {

// What a GET of /metrics at that address answers, without its headers.
inline std::string Scrape(const std::string& address) {
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(connection, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(send(connection, request.data(), request.size(), 0),
            static_cast<ssize_t>(request.size()));
  std::string reply;
  char buffer[4096];
  for (ssize_t n; (n = recv(connection, buffer, sizeof buffer, 0)) > 0;)
    reply.append(buffer, static_cast<std::size_t>(n));
  close(connection);
  EXPECT_NE(reply.find(" 200 OK\r\n"), std::string::npos) << reply;
  return reply.substr(reply.find("\r\n\r\n") + 4);
}

// A scrape by series: "name{label="value",...}" as it is written, and its value.
struct Series {
  explicit Series(const std::string& scraped) : text(scraped) {
    std::istringstream lines(scraped);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("#")) continue;
      const std::size_t space = line.rfind(' ');
      values[line.substr(0, space)] = std::stod(line.substr(space + 1));
    }
  }
  double operator[](const std::string& series) const {
    const auto found = values.find(series);
    if (found == values.end()) ADD_FAILURE() << "no series " << series << " in\n" << text;
    return found == values.end() ? 0 : found->second;
  }

  std::string text;
  std::map<std::string, double> values;
};

}  // namespace kvtier::testing
