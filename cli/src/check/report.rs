//! The report of the checks as a table, as JSON and in short form.

use std::fmt::Write as _;

use serde::Serialize;

use super::problem::{Problem, Severity};

#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct CategoryReport {
    #[serde(rename = "categoryName")]
    pub(crate) name: &'static str,
    pub(crate) checks: Vec<CheckReport>,
}

/// The result of a check. The JSON fields have the names of Linkerd's command.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct CheckReport {
    pub(crate) description: &'static str,
    pub(crate) result: Outcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    Success,
    Warning,
    Error,
}

impl CheckReport {
    pub(crate) fn new(description: &'static str, result: Result<(), Problem>) -> Self {
        let (result, problem) = match result {
            Ok(()) => (Outcome::Success, None),
            Err(problem) if problem.severity == Severity::Warning => (Outcome::Warning, Some(problem)),
            Err(problem) => (Outcome::Error, Some(problem)),
        };
        let (error, hint) = problem.map(|problem| (problem.message, problem.fix)).unzip();
        Self {
            description,
            result,
            error,
            hint,
        }
    }

    fn text(&self) -> String {
        let mark = match self.result {
            Outcome::Success => '√',
            Outcome::Warning => '‼',
            Outcome::Error => '×',
        };
        let mut text = format!("{mark} {}\n", self.description);
        for line in self.error.iter().flat_map(|error| error.lines()) {
            let _ = writeln!(text, "    {line}");
        }
        for (number, line) in self.hint.iter().flat_map(|hint| hint.lines()).enumerate() {
            let prefix = if number == 0 { "fix: " } else { "     " };
            let _ = writeln!(text, "    {prefix}{line}");
        }
        text
    }
}

impl CategoryReport {
    fn has_no_findings(&self) -> bool {
        self.checks.iter().all(|check| check.result == Outcome::Success)
    }

    /// All checks of this category.
    pub(crate) fn table(&self) -> String {
        self.text(|_| true)
    }

    /// The checks that found a problem. Empty if no check found one.
    pub(crate) fn short(&self) -> String {
        if self.has_no_findings() {
            return String::new();
        }
        self.text(|check| check.result != Outcome::Success)
    }

    /// The failed checks, each with its problem and its fix. Empty if no check failed.
    pub(crate) fn failures(&self) -> String {
        let failed = self.checks.iter().filter(|check| check.result == Outcome::Error);
        failed.map(CheckReport::text).collect()
    }

    fn text(&self, shown: impl Fn(&CheckReport) -> bool) -> String {
        let mut text = format!("{}\n{}\n", self.name, "-".repeat(self.name.len()));
        for check in self.checks.iter().filter(|check| shown(check)) {
            text.push_str(&check.text());
        }
        text.push('\n');
        text
    }
}

/// Whether no check found an error. Warnings count as success.
pub(crate) fn succeeded(categories: &[CategoryReport]) -> bool {
    categories
        .iter()
        .flat_map(|category| &category.checks)
        .all(|check| check.result != Outcome::Error)
}

/// The last line of a report for people.
pub(crate) fn conclusion(categories: &[CategoryReport]) -> &'static str {
    if succeeded(categories) {
        "Status check results are √\n"
    } else {
        "Status check results are ×\n"
    }
}

pub(crate) fn json(categories: &[CategoryReport]) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Report<'a> {
        success: bool,
        categories: &'a [CategoryReport],
    }
    let report = Report {
        success: succeeded(categories),
        categories,
    };
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::super::problem::{error, warning};
    use super::*;

    fn report() -> Vec<CategoryReport> {
        vec![
            CategoryReport {
                name: "kubernetes-api",
                checks: vec![CheckReport::new("can query the Kubernetes API", Ok(()))],
            },
            CategoryReport {
                name: "linkerd-crd",
                checks: vec![
                    CheckReport::new("one", Ok(())),
                    CheckReport::new("two", Err(warning("old", "renew it"))),
                    CheckReport::new("three", Err(error("gone:\n  * a", "make a"))),
                ],
            },
        ]
    }

    #[test]
    fn a_table_shows_each_problem_and_its_fix() {
        let text: String = report().iter().map(CategoryReport::table).collect();
        let expected = "\
kubernetes-api
--------------
√ can query the Kubernetes API

linkerd-crd
-----------
√ one
‼ two
    old
    fix: renew it
× three
    gone:
      * a
    fix: make a

";
        assert_eq!(text, expected);
        assert!(!succeeded(&report()));
        assert_eq!(conclusion(&report()), "Status check results are ×\n");
    }

    #[test]
    fn a_short_report_omits_passed_checks() {
        let text: String = report().iter().map(CategoryReport::short).collect();
        assert!(text.starts_with("linkerd-crd\n") && !text.contains("√"), "{text}");
    }

    #[test]
    fn failures_omit_warnings() {
        let texts = report().iter().map(CategoryReport::failures).collect::<Vec<_>>();
        let expected = "× three\n    gone:\n      * a\n    fix: make a\n";
        assert_eq!(texts, ["", expected]);
    }

    #[test]
    fn a_report_with_only_warnings_is_a_success() {
        let mut categories = report();
        categories[1].checks.retain(|check| check.result != Outcome::Error);
        assert!(
            categories[1]
                .checks
                .iter()
                .any(|check| check.result == Outcome::Warning)
        );
        assert!(succeeded(&categories));
        assert_eq!(conclusion(&categories), "Status check results are √\n");
    }

    #[test]
    fn json_has_the_fields_that_scripts_read() {
        let json: serde_json::Value = serde_json::from_str(&json(&report()).unwrap()).unwrap();
        assert_eq!(json["success"], false);
        assert_eq!(json["categories"][1]["categoryName"], "linkerd-crd");
        assert_eq!(json["categories"][1]["checks"][1]["result"], "warning");
        assert_eq!(json["categories"][1]["checks"][2]["error"], "gone:\n  * a");
        assert_eq!(json["categories"][0]["checks"][0].get("hint"), None);
    }
}
