//! Labels and label selectors.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement;
use serde::{Deserialize, Deserializer};

use crate::resources::string_map::StringMap;

/// The labels of an object.
pub type Labels = StringMap;

/// A label selector with valid operators. The empty selector matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: LabelOperator,
}

#[derive(Clone, Debug, PartialEq, Eq)]
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

    pub fn matches(&self, labels: &Labels) -> bool {
        self.matches_all(|key| labels.get(key))
    }

    /// Like [`matches`](Self::matches), for the label map of an API object.
    pub fn matches_map(&self, labels: &BTreeMap<String, String>) -> bool {
        self.matches_all(|key| labels.get(key).map(String::as_str))
    }

    /// A label that every selected object has. `None` if no requirement demands exactly one value.
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

impl<'de> Deserialize<'de> for Selector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let selector = RawSelector::deserialize(deserializer)?;
        Self::from_raw(selector).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().copied().collect()
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
    fn selectors_with_unknown_operators_are_refused() {
        for yaml in [
            "matchExpressions: [{key: app, operator: Near, values: [web]}]",
            "matchExpressions: [{key: app, operator: In}]",
            "matchExpressions: [{key: app, operator: Exists, values: [web]}]",
        ] {
            assert!(serde_yaml_ng::from_str::<Selector>(yaml).is_err(), "{yaml}");
        }
    }
}
