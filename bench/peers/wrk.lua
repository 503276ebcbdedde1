-- Prints what wrk measured as one line of JSON; times in microseconds.
function done(summary, latency)
   local e = summary.errors
   io.write(string.format(
      '{"requests":%d,"seconds":%f,"p50_us":%f,"p99_us":%f,"failed":%d}\n',
      summary.requests, summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
      e.connect + e.read + e.write + e.status + e.timeout))
end
