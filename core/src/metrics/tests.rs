use super::family::MAX_SERIES;
use super::*;

#[test]
fn families_are_printed_by_name_with_help_and_type() {
    let registry = Registry::new();
    let requests = registry.counter("request_total", "Requests\nby \\ direction.");
    requests.get(&Labels::new().with("direction", "outbound")).add(2);
    requests.get(&Labels::new().with("direction", "inbound")).inc();
    registry.gauge("open", "Open connections.").get(&Labels::new()).add(-3);
    registry.counter("never_used", "Nothing.");
    registry.add_collector(|out| out.push_str("mine 1\n"));
    let expected = "# HELP open Open connections.\n# TYPE open gauge\nopen -3\n\
                    # HELP request_total Requests\\nby \\\\ direction.\n# TYPE request_total counter\n\
                    request_total{direction=\"inbound\"} 1\nrequest_total{direction=\"outbound\"} 2\nmine 1\n";
    assert_eq!(registry.render(), expected);
}

#[test]
fn label_values_are_escaped_and_sets_joined() {
    let base = Labels::new().with("a", "x\"y\\z\n");
    let labels = Labels::new().with("b", 1).extend(&base).extend(&Labels::new());
    assert_eq!(labels.as_str(), "b=\"1\",a=\"x\\\"y\\\\z\\n\"");
    let pairs = [("b", "1"), ("a", "x\"y\\z\n")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(labels.pairs(), pairs);
    assert_eq!(Labels::new().pairs(), []);
}

#[test]
fn every_label_name_is_valid() {
    let labels = ["zone", "2nd", "", "a-b", "é"].map(|name| Labels::new().with(name, 1));
    assert_eq!(
        labels.each_ref().map(Labels::as_str),
        ["zone=\"1\"", "_2nd=\"1\"", "_=\"1\"", "a_b=\"1\"", "_=\"1\""]
    );
}

#[test]
fn histograms_are_cumulative_and_a_bound_belongs_to_its_bucket() {
    let registry = Registry::new();
    let latency = registry
        .histogram("latency_seconds", "Latency.", &[0.05, 1.0])
        .get(&Labels::new().with("a", "b"));
    for value in [0.05, 0.5, 7.0] {
        latency.observe(value);
    }
    let expected = "# HELP latency_seconds Latency.\n# TYPE latency_seconds histogram\n\
                    latency_seconds_bucket{a=\"b\",le=\"0.05\"} 1\nlatency_seconds_bucket{a=\"b\",le=\"1\"} 2\n\
                    latency_seconds_bucket{a=\"b\",le=\"+Inf\"} 3\nlatency_seconds_sum{a=\"b\"} 7.55\n\
                    latency_seconds_count{a=\"b\"} 3\n";
    assert_eq!(registry.render(), expected);
}

#[test]
fn gauges_set_before_render_are_up_to_date_and_can_have_fractions() {
    let registry = Registry::new();
    let age = registry.float_gauge("age_seconds", "Age.").get(&Labels::new());
    registry.before_render(move || age.set(age.get() + 0.25));
    for expected in ["0.25", "0.5"] {
        let expected = format!("# HELP age_seconds Age.\n# TYPE age_seconds gauge\nage_seconds {expected}\n");
        assert_eq!(registry.render(), expected);
    }
}

#[tokio::test]
async fn runtimes_are_counted_together() {
    let registry = Registry::new();
    let runtime = tokio::runtime::Handle::current().metrics();
    register_runtime_metrics(&registry, vec![runtime.clone(), runtime]);
    let page = registry.render();
    assert!(page.contains("\ntokio_rt_workers 2\n"), "{page}");
}

#[test]
fn the_same_name_returns_the_same_family() {
    let registry = Registry::new();
    registry.counter("a_total", "A.").get(&Labels::new()).inc();
    assert_eq!(registry.counter("a_total", "A.").get(&Labels::new()).get(), 1);
}

#[test]
#[should_panic(expected = "one type")]
fn a_name_with_two_types_panics() {
    let registry = Registry::new();
    registry.counter("a", "A.");
    registry.gauge("a", "A.");
}

#[tokio::test(start_paused = true)]
async fn series_are_removed_after_their_handles_are_dropped_and_an_idle_time() {
    let idle = Duration::from_secs(600);
    let registry = Registry::new();
    let family = registry.counter("a_total", "A.");
    let held = family.get(&Labels::new().with("held", 1));
    family.get(&Labels::new().with("dropped", 1)).inc();

    registry.retire(idle);
    tokio::time::advance(idle / 2).await;
    registry.retire(idle);
    assert!(registry.render().contains("dropped"));

    tokio::time::advance(idle).await;
    registry.retire(idle);
    let text = registry.render();
    assert!(!text.contains("dropped") && text.contains("held"), "{text}");

    drop(held);
    registry.retire(idle);
    assert!(
        registry.render().contains("held"),
        "the series must be kept until it has been idle"
    );
    tokio::time::advance(idle).await;
    registry.retire(idle);
    assert_eq!(registry.render(), "");
}

#[test]
fn the_series_with_a_label_are_removed_from_all_families() {
    let registry = Registry::new();
    let cluster = |name: &str| Labels::new().with("cluster", name);
    let requests = registry.counter("a_total", "A.");
    let held = requests.get(&cluster("east").with("code", 200));
    requests.get(&cluster("west")).inc();
    let sizes = registry.gauge("b", "B.");
    sizes.get(&cluster("east")).set(1);
    sizes.get(&Labels::new().with("other", "east")).set(1);

    registry.remove_series("cluster", "east");
    held.inc();
    let page = registry.render();
    assert!(!page.contains("cluster=\"east\""), "{page}");
    for line in ["a_total{cluster=\"west\"} 1\n", "b{other=\"east\"} 1\n"] {
        assert!(page.contains(line), "{line} is not in\n{page}");
    }
    let new = requests.get(&cluster("east").with("code", 200));
    assert_eq!(new.get(), 0, "a new series does not continue the removed one");
}

#[test]
fn a_full_family_keeps_counting_in_one_series() {
    let registry = Registry::new();
    let family = registry.counter("a_total", "A.");
    let held: Vec<_> = (0..MAX_SERIES)
        .map(|n| family.get(&Labels::new().with("n", n)))
        .collect();
    family.get(&Labels::new().with("n", "more")).inc();
    family.get(&Labels::new().with("n", "and more")).inc();
    family.get(&Labels::new().with("n", 7)).inc();
    assert_eq!(held[7].get(), 1);
    let text = registry.render();
    assert!(text.contains("a_total{overflow=\"true\"} 2\n"));
    assert!(text.contains("tulle_metrics_series_overflow_total{family=\"a_total\"} 2\n"));
    drop(held);
    registry.retire(Duration::ZERO);
    registry.retire(Duration::ZERO);
    let text = registry.render();
    assert!(!text.contains("n=\""));
    assert!(
        text.contains("a_total{overflow=\"true\"} 2\n"),
        "the overflow counter does not disappear"
    );
}

#[test]
fn a_family_can_have_a_lower_limit() {
    let registry = Registry::new();
    let family = registry.counter("a_total", "A.").limit_series(2);
    for n in 0..5 {
        family.get(&Labels::new().with("n", n)).inc();
    }
    let text = registry.render();
    assert!(text.contains("a_total{overflow=\"true\"} 3\n"), "{text}");
}
