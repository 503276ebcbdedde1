//! Metrics of tokio's runtimes, read at every scrape.

use tokio::runtime::RuntimeMetrics;

use super::labels::Labels;
use super::text;

/// Writes the `tokio_rt_*` totals of these runtimes, as far as tokio provides them without `tokio_unstable`.
pub(super) fn write(runtimes: &[RuntimeMetrics], out: &mut String) {
    let sum_over_runtimes = |value: &dyn Fn(&RuntimeMetrics) -> f64| runtimes.iter().map(value).sum::<f64>();
    let sum_over_workers = |value: &dyn Fn(&RuntimeMetrics, usize) -> f64| {
        sum_over_runtimes(&|runtime| (0..runtime.num_workers()).map(|worker| value(runtime, worker)).sum())
    };
    let mut write_metric = |name, help, kind, value: f64| {
        text::write_header(out, name, help, kind);
        text::write_sample(out, name, &Labels::new(), value);
    };
    write_metric(
        "tokio_rt_workers",
        "Number of worker threads.",
        "gauge",
        sum_over_runtimes(&|runtime| runtime.num_workers() as f64),
    );
    write_metric(
        "tokio_rt_alive_tasks",
        "Number of alive tasks.",
        "gauge",
        sum_over_runtimes(&|runtime| runtime.num_alive_tasks() as f64),
    );
    write_metric(
        "tokio_rt_injection_queue_depth",
        "Number of tasks in the global queue.",
        "gauge",
        sum_over_runtimes(&|runtime| runtime.global_queue_depth() as f64),
    );
    write_metric(
        "tokio_rt_park_total",
        "Number of times that worker threads parked.",
        "counter",
        sum_over_workers(&|runtime, worker| runtime.worker_park_count(worker) as f64),
    );
    write_metric(
        "tokio_rt_busy_seconds_total",
        "Time that worker threads were busy, in seconds.",
        "counter",
        sum_over_workers(&|runtime, worker| runtime.worker_total_busy_duration(worker).as_secs_f64()),
    );
}
