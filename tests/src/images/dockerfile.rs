//! Reads the settings of a final stage from the `Dockerfile`, so that they are defined once.

use anyhow::{Context as _, bail, ensure};

use super::settings::Settings;

/// The image settings of a stage.
///
/// Supports the instructions that the final stages use, each on one line: `ENTRYPOINT`, `ENV`, `USER`, `LABEL` with one label, and
/// `COPY` from the build stage. `images/roots` provides the files of `COPY`.
pub(super) fn settings(text: &str, stage: &str) -> anyhow::Result<Settings> {
    let start = format!("FROM scratch AS {stage}");
    let mut lines = text.lines().map(str::trim).skip_while(|line| *line != start);
    lines
        .next()
        .with_context(|| format!("the Dockerfile has no line {start:?}"))?;
    let mut settings = Settings::default();
    for line in lines.take_while(|line| !line.starts_with("FROM ")) {
        let (instruction, rest) = line.split_once(' ').unwrap_or((line, ""));
        match instruction {
            "" => {}
            "COPY" => ensure!(
                rest == format!("--from=build /out/{stage} /"),
                "the Dockerfile's stage {stage} copies {rest:?}, which images/roots does not create"
            ),
            "ENTRYPOINT" => settings.entrypoint = serde_json::from_str(rest).context("the Dockerfile's entrypoint")?,
            "ENV" => settings.env.push(rest.to_owned()),
            "USER" => rest.clone_into(&mut settings.user),
            "LABEL" => {
                let label = rest.split_once('=');
                let (key, value) = label.with_context(|| format!("the Dockerfile's label {rest:?} has no value"))?;
                let value = value.trim_matches('"').to_owned();
                settings.labels.insert(key.to_owned(), value);
            }
            other => bail!("the Dockerfile's stage {stage} has the unknown instruction {other}"),
        }
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_are_those_of_the_stage() {
        let text = "FROM rust AS build\nUSER 1\nFROM scratch AS a\nCOPY --from=build /out/a /\nENV X=1\nUSER 7\n\
                    LABEL a.title=\"A b\"\nLABEL a.url=https://a/?b=c\nENTRYPOINT [\"/a\", \"b\"]\n\nFROM scratch AS b\nUSER 8\n";
        let expected = Settings {
            entrypoint: vec!["/a".to_owned(), "b".to_owned()],
            env: vec!["X=1".to_owned()],
            user: "7".to_owned(),
            labels: [("a.title", "A b"), ("a.url", "https://a/?b=c")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
        };
        assert_eq!(settings(text, "a").unwrap(), expected);
        assert_eq!(settings(text, "b").unwrap().user, "8");
        assert!(settings(text, "c").unwrap_err().to_string().contains("AS c"));
        assert!(
            settings("FROM scratch AS a\nRUN rm /", "a")
                .unwrap_err()
                .to_string()
                .contains("RUN")
        );
    }
}
