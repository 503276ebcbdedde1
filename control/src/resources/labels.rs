//! Labels and label selectors.

use std::collections::BTreeMap;
use std::str::FromStr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde::{Deserialize, Deserializer};

use crate::resources::string_map::StringMap;

/// The labels of an object.
pub type Labels = StringMap;

/// A label selector with valid operators. The empty selector matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Requirement {
    key: String,
    operator: LabelOperator,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LabelOperator {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
}

/// A selector in a manifest. Unknown fields are rejected, because ignoring them would select too much.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[derive(Default)]
struct RawSelector {
    match_labels: BTreeMap<String, String>,
    match_expressions: Vec<LabelSelectorRequirement>,
}

impl Selector {
    /// Returns the selector of a Service, which requires each label with its value.
    pub fn from_match_labels(labels: &Labels) -> Self {
        let requirement = |(key, value): (&str, &str)| Requirement {
            key: key.to_owned(),
            operator: LabelOperator::In(vec![value.to_owned()]),
        };
        Self(labels.iter().map(requirement).collect())
    }

    /// Returns whether the selector has no requirement.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn matches(&self, labels: &Labels) -> bool {
        self.matches_all(|key| labels.get(key))
    }

    /// Like [`matches`](Self::matches), for the label map of an API object.
    pub fn matches_map(&self, labels: &BTreeMap<String, String>) -> bool {
        self.matches_all(|key| labels.get(key).map(String::as_str))
    }

    /// Returns a label that every selected object has. `None` if no requirement demands exactly one value.
    pub fn required_label(&self) -> Option<(&str, &str)> {
        self.0.iter().find_map(|requirement| match &requirement.operator {
            LabelOperator::In(values) if values.len() == 1 => Some((&*requirement.key, &*values[0])),
            _ => None,
        })
    }

    fn matches_all<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|requirement| {
            let value = label(&requirement.key);
            match &requirement.operator {
                LabelOperator::In(values) => value.is_some_and(|value| values.iter().any(|other| other == value)),
                LabelOperator::NotIn(values) => value.is_none_or(|value| values.iter().all(|other| other != value)),
                LabelOperator::Exists => value.is_some(),
                LabelOperator::DoesNotExist => value.is_none(),
            }
        })
    }

    fn from_raw(selector: RawSelector) -> Result<Self, String> {
        let mut requirements = Vec::new();
        for (key, value) in selector.match_labels {
            requirements.push(Requirement {
                key,
                operator: LabelOperator::In(vec![value]),
            });
        }
        for expression in selector.match_expressions {
            let values = expression.values.unwrap_or_default();
            let operator = match (expression.operator.as_str(), values.is_empty()) {
                ("In", false) => LabelOperator::In(values),
                ("NotIn", false) => LabelOperator::NotIn(values),
                ("Exists", true) => LabelOperator::Exists,
                ("DoesNotExist", true) => LabelOperator::DoesNotExist,
                (operator, _) => {
                    return Err(format!(
                        "selector on {}: {operator} with {} values; In and NotIn need values, Exists and DoesNotExist take none",
                        expression.key,
                        values.len()
                    ));
                }
            };
            requirements.push(Requirement {
                key: expression.key,
                operator,
            });
        }
        Ok(Self(requirements))
    }
}

/// A requirement of one value becomes an entry of `matchLabels`, all others become entries of `matchExpressions`.
impl From<&Selector> for LabelSelector {
    fn from(selector: &Selector) -> Self {
        let (mut labels, mut expressions) = (BTreeMap::new(), Vec::new());
        for Requirement { key, operator } in &selector.0 {
            let (name, values) = match operator {
                LabelOperator::In(values) => match &values[..] {
                    [value] if !labels.contains_key(key) => {
                        labels.insert(key.clone(), value.clone());
                        continue;
                    }
                    _ => ("In", Some(values.clone())),
                },
                LabelOperator::NotIn(values) => ("NotIn", Some(values.clone())),
                LabelOperator::Exists => ("Exists", None),
                LabelOperator::DoesNotExist => ("DoesNotExist", None),
            };
            expressions.push(LabelSelectorRequirement {
                key: key.clone(),
                operator: name.to_owned(),
                values,
            });
        }
        Self {
            match_labels: (!labels.is_empty()).then_some(labels),
            match_expressions: (!expressions.is_empty()).then_some(expressions),
        }
    }
}

/// Parses the syntax of command lines: requirements such as `app=web,tier!=db,env in (a,b),exported,!old`, joined by commas.
impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut requirements = Vec::new();
        let mut rest = text;
        while !rest.trim().is_empty() {
            // Commas in parentheses separate values.
            let mut depth = 0_u32;
            let end = rest.find(|ch| {
                match ch {
                    '(' => depth += 1,
                    ')' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                ch == ',' && depth == 0
            });
            let (part, after) = end.map_or((rest, ""), |end| (&rest[..end], &rest[end + 1..]));
            requirements.push(parse_requirement(part.trim())?);
            rest = after;
        }
        Ok(Self(requirements))
    }
}

fn parse_requirement(text: &str) -> Result<Requirement, String> {
    let values = |list: &str| -> Vec<String> { list.split(',').map(|value| value.trim().to_owned()).collect() };
    let set = text.strip_suffix(')').and_then(|text| text.split_once('('));
    let set = set.and_then(|(left, list)| Some((left.trim().rsplit_once(' ')?, list)));
    let (key, operator) = match set {
        Some(((key, "in"), list)) => (key, LabelOperator::In(values(list))),
        Some(((key, "notin"), list)) => (key, LabelOperator::NotIn(values(list))),
        _ => match text.split_once('=') {
            Some((key, value)) => {
                let value = vec![value.trim_start_matches('=').trim().to_owned()];
                match key.strip_suffix('!') {
                    Some(key) => (key, LabelOperator::NotIn(value)),
                    None => (key, LabelOperator::In(value)),
                }
            }
            None => match text.strip_prefix('!') {
                Some(key) => (key, LabelOperator::DoesNotExist),
                None => (text, LabelOperator::Exists),
            },
        },
    };
    let key = key.trim();
    let is_name = |ch: char| ch.is_ascii_alphanumeric() || "-_./".contains(ch);
    match !key.is_empty() && key.chars().all(is_name) {
        true => Ok(Requirement {
            key: key.to_owned(),
            operator,
        }),
        false => Err(format!(
            "{text:?} is none of: label=value, label!=value, label in (a,b), label notin (a,b), label, !label"
        )),
    }
}

impl<'de> Deserialize<'de> for Selector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let selector = RawSelector::deserialize(deserializer)?;
        Self::from_raw(selector).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().copied().collect()
    }

    #[test]
    fn selectors_of_command_lines_match_as_in_kubectl() {
        for (text, pairs, expected) in [
            ("", &[][..], true),
            ("app", &[("app", "x")], true),
            ("app", &[], false),
            ("!app", &[("app", "x")], false),
            ("app=web, tier!=db", &[("app", "web"), ("tier", "x")], true),
            ("app==web", &[("app", "web")], true),
            (
                "app in (a, b),tier notin (x,y),!old",
                &[("app", "b"), ("tier", "z")],
                true,
            ),
            ("app in (a, b),tier notin (x,y)", &[("app", "b"), ("tier", "y")], false),
        ] {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(selector.matches(&labels(pairs)), expected, "{text}");
        }
        for invalid in ["=x", "a b", "app in a", "(a)"] {
            let error = invalid.parse::<Selector>().unwrap_err();
            assert!(error.contains("is none of: label=value"), "{error}");
        }
    }

    #[test]
    fn selectors_match_as_in_kubernetes() {
        let check = |yaml: &str, pairs: &[(&str, &str)], expected: bool| {
            let selector: Selector = serde_yaml_ng::from_str(yaml).unwrap();
            assert_eq!(selector.matches(&labels(pairs)), expected, "{yaml} on {pairs:?}");
        };
        check("{}", &[], true);
        check("matchLabels: {app: web}", &[("app", "web"), ("tier", "x")], true);
        check("matchLabels: {app: web}", &[("app", "api")], false);
        check(
            "matchExpressions: [{key: app, operator: In, values: [web, api]}]",
            &[("app", "api")],
            true,
        );
        check(
            "matchExpressions: [{key: app, operator: NotIn, values: [web]}]",
            &[],
            true,
        );
        check(
            "matchExpressions: [{key: app, operator: NotIn, values: [web]}]",
            &[("app", "web")],
            false,
        );
        check("matchExpressions: [{key: app, operator: Exists}]", &[("app", "")], true);
        check(
            "matchExpressions: [{key: app, operator: DoesNotExist}]",
            &[("app", "")],
            false,
        );
    }

    #[test]
    fn selectors_of_command_lines_become_those_of_manifests() {
        for (text, expected) in [
            ("a=b, c == d", json!({"matchLabels": {"a": "b", "c": "d"}})),
            (
                "a in (b,c),d!=e,!f,g",
                json!({"matchExpressions": [
                    {"key": "a", "operator": "In", "values": ["b", "c"]},
                    {"key": "d", "operator": "NotIn", "values": ["e"]},
                    {"key": "f", "operator": "DoesNotExist"},
                    {"key": "g", "operator": "Exists"},
                ]}),
            ),
        ] {
            let selector: Selector = text.parse().unwrap();
            let manifest = json!(LabelSelector::from(&selector));
            assert_eq!(manifest, expected, "{text}");
            assert_eq!(Selector::deserialize(manifest).unwrap(), selector, "{text}");
        }
    }

    #[test]
    fn selectors_with_unknown_operators_or_the_wrong_number_of_values_are_refused() {
        for yaml in [
            "matchExpressions: [{key: app, operator: Near, values: [web]}]",
            "matchExpressions: [{key: app, operator: In}]",
            "matchExpressions: [{key: app, operator: Exists, values: [web]}]",
        ] {
            assert!(serde_yaml_ng::from_str::<Selector>(yaml).is_err(), "{yaml}");
        }
    }
}
