//! Bar charts as SVG.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A chart with groups of bars.
pub(super) struct BarChart {
    pub(super) title: String,
    pub(super) unit: String,
    pub(super) groups: Vec<Group>,
}

/// A labelled group of bars. Each bar has the name of its series and a value.
pub(super) struct Group {
    pub(super) label: String,
    pub(super) bars: Vec<(String, f64)>,
}

impl BarChart {
    /// Renders the chart. Each group has its own scale, because rows differ by orders of magnitude. Values are printed above the
    /// bars.
    pub(super) fn svg(&self) -> String {
        let mut colours: BTreeMap<&str, &str> = BTreeMap::new();
        for (name, _) in self.groups.iter().flat_map(|group| &group.bars) {
            let next = COLOURS[colours.len() % COLOURS.len()];
            colours.entry(name).or_insert(next);
        }
        let bars = self
            .groups
            .iter()
            .map(|group| group.bars.len())
            .max()
            .unwrap_or_default();
        let group_width = bars as f64 * BAR_WIDTH + GROUP_GAP;
        let width = (MARGIN * 2.0 + self.groups.len() as f64 * group_width).max(MIN_WIDTH);
        let base = TOP_MARGIN + MAX_BAR_HEIGHT;

        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {}\" font-family=\"sans-serif\" font-size=\"11\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{MARGIN}\" y=\"20\" font-size=\"14\" font-weight=\"bold\">{} [{}]</text>\n",
            base + 30.0,
            escape_xml(&self.title),
            escape_xml(&self.unit)
        );
        for (at, (name, colour)) in colours.iter().enumerate() {
            let x = MARGIN + at as f64 * 80.0;
            let _ = writeln!(
                out,
                "<rect x=\"{x}\" y=\"30\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{}\" y=\"39\">{}</text>",
                x + 14.0,
                escape_xml(name)
            );
        }
        for (at, group) in self.groups.iter().enumerate() {
            let left = MARGIN + at as f64 * group_width;
            let max_value = group
                .bars
                .iter()
                .map(|(_, value)| *value)
                .fold(f64::MIN_POSITIVE, f64::max);
            for (at, (name, value)) in group.bars.iter().enumerate() {
                let height = (value / max_value * MAX_BAR_HEIGHT).max(0.0);
                let (x, y) = (left + at as f64 * BAR_WIDTH, base - height);
                let _ = writeln!(
                    out,
                    "<rect x=\"{x}\" y=\"{y:.1}\" width=\"{}\" height=\"{height:.1}\" fill=\"{}\"/>\
                     <text x=\"{}\" y=\"{:.1}\" font-size=\"9\" text-anchor=\"middle\">{}</text>",
                    BAR_WIDTH - 4.0,
                    colours[name.as_str()],
                    x + (BAR_WIDTH - 4.0) / 2.0,
                    y - 3.0,
                    format_short(*value)
                );
            }
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                left + group.bars.len() as f64 * BAR_WIDTH / 2.0,
                base + 16.0,
                escape_xml(&group.label)
            );
        }
        out.push_str("</svg>\n");
        out
    }
}

/// Formats a value so that it fits above a bar: "7.3", "128", "45k".
fn format_short(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.0}k", value / 1000.0),
        value if value >= 100.0 => format!("{value:.0}"),
        value => format!("{value:.1}"),
    }
}

fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

const COLOURS: [&str; 6] = ["#1b6ca8", "#e07a1f", "#5a9e4b", "#9b59b6", "#7f7f7f", "#c0392b"];
const BAR_WIDTH: f64 = 32.0;
const GROUP_GAP: f64 = 28.0;
const MARGIN: f64 = 20.0;
const TOP_MARGIN: f64 = 65.0;
const MAX_BAR_HEIGHT: f64 = 180.0;
const MIN_WIDTH: f64 = 560.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_bar_of_each_group_has_the_full_height() {
        let group = |label: &str, bars: &[(&str, f64)]| Group {
            label: label.to_owned(),
            bars: bars.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        };
        let svg = BarChart {
            title: "a < b".to_owned(),
            unit: "µs".to_owned(),
            groups: vec![
                group("one", &[("x", 1.0), ("y", 2.0)]),
                group("two", &[("y", 50_000.0)]),
            ],
        }
        .svg();
        assert!(svg.contains("a &lt; b [µs]"), "{svg}");
        assert_eq!(svg.matches("height=\"180.0\"").count(), 2, "{svg}");
        assert_eq!(svg.matches("height=\"90.0\"").count(), 1, "{svg}");
        assert!(svg.contains(">50k<"), "{svg}");
        assert_eq!(format_short(7.25), "7.2");
    }
}
