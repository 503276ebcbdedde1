//! Parses the Prometheus text that proxies serve at `/metrics`.

/// One sample: a name, its labels in the order of the text, and a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

/// All samples of one scrape.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<Sample>);

impl Sample {
    pub fn label(&self, name: &str) -> Option<&str> {
        let label = self.labels.iter().find(|(key, _)| key == name);
        label.map(|(_, value)| value.as_str())
    }

    /// Whether the sample has all of these labels with these values.
    pub fn matches(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.label(name) == Some(value))
    }
}

impl Samples {
    /// Parses a page. Lines that are not samples are skipped, because proxies of other versions may use other syntax.
    pub fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(parse_sample).collect())
    }

    /// The samples with this name that have these labels. Those of a histogram are named `…_bucket`, `…_sum` and `…_count`.
    pub fn named<'a>(&'a self, name: &'a str, labels: &'a [(&'a str, &'a str)]) -> impl Iterator<Item = &'a Sample> {
        self.0
            .iter()
            .filter(move |sample| sample.name == name && sample.matches(labels))
    }

    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.named(name, labels).map(|sample| sample.value).sum()
    }
}

/// Iterates over the samples with wanted names. Other lines are parsed up to the name only.
pub fn parse_named(text: &str, is_wanted: fn(&str) -> bool) -> impl Iterator<Item = Sample> {
    let has_wanted_name = move |line: &&str| {
        let name = line.trim_start().split(['{', ' ']).next();
        name.is_some_and(is_wanted)
    };
    text.lines().filter(has_wanted_name).filter_map(parse_sample)
}

/// Parses `name{key="value",…} number`, optionally followed by a timestamp.
fn parse_sample(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let name_end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(name_end);
    if name.is_empty() {
        return None;
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => parse_labels(inside)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Parses labels up to the closing brace, and returns the rest.
fn parse_labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let (value, after) = parse_quoted(after)?;
        labels.push((name.trim().to_owned(), value));
        rest = after;
    }
}

/// Parses a value up to its closing quote, and returns the rest.
fn parse_quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels_and_values() {
        let samples = Samples::parse(
            "# HELP request_total HTTP requests\n\
             # TYPE request_total counter\n\
             request_total{direction=\"inbound\",tls=\"true\",client_id=\"load.demo\"} 12\n\
             request_total{direction=\"inbound\",tls=\"no_identity\",no_tls_reason=\"no_tls_from_remote\"} 3 1700000000\n\
             escaped{reason=\"a \\\"b\\\" \\\\ c, d}\\n\"} 1.5e3\n\
             plain 7\n\
             # EOF\n",
        );
        assert_eq!(samples.sum("request_total", &[("direction", "inbound")]), 15.0);
        assert_eq!(samples.sum("request_total", &[("tls", "true")]), 12.0);
        let escaped = samples.named("escaped", &[]).next().unwrap();
        assert_eq!(escaped.label("reason"), Some("a \"b\" \\ c, d}\n"));
        assert_eq!(escaped.value, 1500.0);
        assert_eq!(samples.sum("plain", &[]), 7.0);
        assert_eq!(samples.sum("absent", &[]), 0.0);
    }

    #[test]
    fn lines_that_are_not_samples_are_skipped() {
        for line in [
            "",
            "#",
            "name",
            "name{",
            "name{a",
            "name{a=\"",
            "name{a=\"b\\",
            "name{a=\"b\"} x",
            "{} 1 2 3",
            "}{",
        ] {
            let samples = Samples::parse(&format!("before 1\n{line}\nafter 2\n"));
            let names: Vec<_> = samples.0.iter().map(|sample| sample.name.as_str()).collect();
            assert_eq!(names, ["before", "after"], "{line}");
        }
    }

    proptest::proptest! {
        #[test]
        fn parsing_a_page_never_panics(page in "[ -~\n\"\\\\é]{0,200}") {
            Samples::parse(&page);
        }
    }
}
