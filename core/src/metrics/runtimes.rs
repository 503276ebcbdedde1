//! What tokio knows of its runtimes, at every scrape.

use tokio::runtime::RuntimeMetrics;

use super::{Labels, text};

/// Writes the `tokio_rt_*` metrics of all these runtimes together, as far as tokio tells them to every build.
pub(super) fn write(runtimes: &[RuntimeMetrics], out: &mut String) {
    let sum = |of: &dyn Fn(&RuntimeMetrics) -> f64| runtimes.iter().map(of).sum::<f64>();
    let workers = |of: &dyn Fn(&RuntimeMetrics, usize) -> f64| {
        sum(&|runtime| (0..runtime.num_workers()).map(|worker| of(runtime, worker)).sum())
    };
    let mut say = |name, help, kind, value: f64| {
        text::head(out, name, help, kind);
        text::sample(out, name, &Labels::new(), value);
    };
    say(
        "tokio_rt_workers",
        "Threads that run tasks.",
        "gauge",
        workers(&|_, _| 1.0),
    );
    say(
        "tokio_rt_alive_tasks",
        "Tasks that have not ended.",
        "gauge",
        sum(&|runtime| runtime.num_alive_tasks() as f64),
    );
    say(
        "tokio_rt_injection_queue_depth",
        "Tasks that wait for any thread.",
        "gauge",
        sum(&|runtime| runtime.global_queue_depth() as f64),
    );
    say(
        "tokio_rt_park_total",
        "Times that threads had nothing to run.",
        "counter",
        workers(&|runtime, worker| runtime.worker_park_count(worker) as f64),
    );
    say(
        "tokio_rt_busy_seconds_total",
        "Seconds that threads have run tasks.",
        "counter",
        workers(&|runtime, worker| runtime.worker_total_busy_duration(worker).as_secs_f64()),
    );
}
