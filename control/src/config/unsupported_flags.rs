//! `tulle_unsupported_flag`: the flags that are set and have no effect.

use std::sync::Arc;

use tulle_core::metrics::{Gauge, Labels, Registry};

use crate::config::flags::Flags;

/// Returns the flags that are set and have no effect. A flag that is empty or false counts as not set.
pub(super) fn find(flags: &Flags) -> Vec<&'static str> {
    let is_set = |value: &Option<String>| value.as_ref().is_some_and(|value| !value.is_empty());
    let ignored = [
        ("--stream-queue-capacity", flags.stream_queue_capacity.is_some()),
        ("--export-queue-metrics", flags.export_queue_metrics == Some(true)),
        ("--identity-scheme", is_set(&flags.identity_scheme)),
        ("--trace-collector", is_set(&flags.trace_collector)),
        ("--enable-pprof", flags.enable_pprof == Some(true)),
        ("--event-requeue-limit", flags.mirror.event_requeue_limit.is_some()),
    ];
    let set = ignored.into_iter().filter(|(_, is_set)| *is_set);
    set.map(|(flag, _)| flag).collect()
}

/// Registers the metric. Its series live as long as the returned gauges.
pub(crate) fn register(registry: &Registry, flags: &[&'static str]) -> Vec<Arc<Gauge>> {
    let family = registry.gauge("tulle_unsupported_flag", "Flags that are set and have no effect.");
    let gauges = flags.iter().map(|flag| family.get(&Labels::new().with("name", flag)));
    let gauges: Vec<_> = gauges.collect();
    for gauge in &gauges {
        gauge.set(1);
    }
    gauges
}
