-- Arguments after "--": the number of bytes to post (0 for a GET), and "close" for a new connection per request.
function init(args)
   local bytes = tonumber(args[1])
   if bytes > 0 then
      wrk.method = "POST"
      wrk.body = string.rep("x", bytes)
   end
   if args[2] == "close" then
      wrk.headers["Connection"] = "close"
   end
end

-- Prints the results as one line of JSON. Times are in microseconds.
function done(summary, latency)
   local e = summary.errors
   io.write(string.format(
      '{"requests":%d,"seconds":%f,"p50_us":%f,"p99_us":%f,"failed":%d}\n',
      summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
      e.connect + e.read + e.write + e.status + e.timeout))
end
