//! The results of scenes, as a table.

use std::fmt::Write as _;
use std::time::Duration;

use parking_lot::Mutex;

/// One row for each server and scene.
#[derive(Default)]
pub(super) struct Results(Mutex<Vec<Row>>);

struct Row {
    server: String,
    version: String,
    scene: String,
    took: Duration,
    result: Result<String, String>,
}

impl Results {
    /// Adds a result of a server, given by its name and version, and prints it.
    pub(super) fn add(
        &self,
        (server, version): (&str, &str),
        scene: &str,
        took: Duration,
        result: anyhow::Result<String>,
    ) {
        let row = Row {
            server: server.to_owned(),
            version: version.to_owned(),
            scene: scene.to_owned(),
            took,
            result: result.map_err(|error| format!("{error:#}")),
        };
        eprint!("{}", row.line());
        self.0.lock().push(row);
    }

    /// Prints a table of all results.
    ///
    /// # Panics
    /// Panics if a scene has failed; the message contains its error.
    pub(super) fn print_and_assert(&self) {
        let rows = self.0.lock();
        let mut table = "| server | version | scene | seconds | result |\n|---|---|---|---|---|\n".to_owned();
        let mut failed = String::new();
        for row in rows.iter() {
            table += &row.line();
            if let Err(error) = &row.result {
                let _ = writeln!(failed, "{}, {}: {error}", row.server, row.scene);
            }
        }
        eprint!("{table}");
        assert!(failed.is_empty(), "{failed}");
    }
}

impl Row {
    fn line(&self) -> String {
        let Self {
            server,
            version,
            scene,
            took,
            result,
        } = self;
        let text = match result {
            Ok(detail) => detail.clone(),
            Err(error) => format!("FAILED: {}", error.replace('\n', " ")),
        };
        let seconds = took.as_secs_f64();
        format!("| {server} | {version} | {scene} | {seconds:.1} | {text} |\n")
    }
}
