//! The shape of the repository: imports go down the floors, and no file is too long.
//!
//! The tables below are those of `ARCHITECTURE.md`.
//! A file imports from its own room and from lower floors, never up and never sideways.

mod documented;
mod paths;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The rooms of a crate: its top-level modules, each with its floor.
struct House {
    name: &'static str,
    rooms: &'static [(&'static str, u8)],
}

const PROXY: House = House {
    name: "proxy",
    rooms: &[
        ("net", 1),
        ("policy", 1),
        ("metrics", 1),
        ("tls", 2),
        ("http", 2),
        ("balance", 2),
        ("api", 3),
        ("identity", 4),
        ("tap", 4),
        ("trace", 4),
        ("admin", 4),
        ("outbound", 5),
        ("inbound", 5),
        ("gateway", 6),
        ("app", TOP),
        ("config", TOP),
        ("env", TOP),
        ("fuzz", TOP),
        ("messages", TOP),
    ],
};

const CONTROL: House = House {
    name: "control",
    rooms: &[
        ("resources", 1),
        ("model", 1),
        ("wire", 1),
        ("trust", 1),
        ("kubernetes", 1),
        ("grpc", 1),
        ("inject", 2),
        ("source", 2),
        ("cluster", 2),
        ("tls", 2),
        ("serving", 3),
        ("destination", 3),
        ("policy", 3),
        ("identity", 3),
        ("webhook", 3),
        ("writeback", 3),
        ("admission", 4),
        ("injector", 4),
        ("telemetry", 4),
        ("app", TOP),
        ("cmd", TOP),
        ("config", TOP),
        ("fuzz", TOP),
        ("logs", TOP),
    ],
};

/// The floor where everything is put together; its files are one room.
const TOP: u8 = 9;

/// Which of our crates a crate may use outside its tests.
const CRATES: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("proto", &[]),
    ("proxy", &["core", "proto"]),
    ("control", &["core", "proto"]),
    ("init", &["core"]),
    ("cli", &["core", "proto", "control"]),
    // It makes the credentials of the mesh that it measures, as the command line does.
    ("bench", &["core", "proto", "proxy", "control"]),
    ("tests", &["core", "proto", "proxy", "control", "init", "cli", "bench"]),
];

const MAX_LINES: usize = 800;

#[test]
fn imports_of_the_proxy_go_down() {
    check_house(&PROXY);
}

#[test]
fn imports_of_the_control_plane_go_down() {
    check_house(&CONTROL);
}

#[test]
fn crates_use_lower_crates_only() {
    let mut wrong = Vec::new();
    for (name, allowed) in CRATES {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).expect("every crate has a manifest");
        wrong.extend(wrong_dependencies(name, allowed, &manifest));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn no_source_file_is_longer_than_800_lines() {
    let mut too_long = Vec::new();
    for (name, _) in CRATES {
        for file in files_below(&root().join(name)) {
            let n_lines = fs::read_to_string(&file)
                .expect("sources are readable UTF-8")
                .lines()
                .count();
            if n_lines > MAX_LINES {
                too_long.push(format!("{}: {n_lines} lines", file.display()));
            }
        }
    }
    assert!(too_long.is_empty(), "\n{}", too_long.join("\n"));
}

fn check_house(house: &House) {
    let src = root().join(house.name).join("src");
    let mut wrong = Vec::new();
    for file in files_below(&src) {
        let source = fs::read_to_string(&file).expect("sources are readable UTF-8");
        let relative = file.strip_prefix(&src).expect("it was found below");
        wrong.extend(wrong_imports(house, relative, &source));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// What a file imports although it must not, one line each.
fn wrong_imports(house: &House, file: &Path, source: &str) -> Vec<String> {
    let module = module_of(file);
    // `main.rs` and `lib.rs` are the root itself, and belong to the top.
    let room = module.first().map_or("app", String::as_str);
    let place = |line| format!("{}/src/{}:{line}", house.name, file.display());
    let Some(floor) = house.floor(room) else {
        return vec![format!(
            "{}: room {room} has no floor; put it into the tables",
            place(1)
        )];
    };
    let imports = paths::from_root(source, module.len());
    let wrong = imports
        .into_iter()
        .filter_map(|import| match house.floor(&import.room) {
            Some(other) if other < floor || import.room == room || (other, floor) == (TOP, TOP) => None,
            Some(other) => Some(format!(
                "{}: {room} (floor {floor}) imports {} (floor {other})",
                place(import.line),
                import.room
            )),
            None => Some(format!(
                "{}: {} is no room; import from the room that has it",
                place(import.line),
                import.room
            )),
        });
    wrong.collect()
}

impl House {
    fn floor(&self, room: &str) -> Option<u8> {
        self.rooms
            .iter()
            .find(|(name, _)| *name == room)
            .map(|(_, floor)| *floor)
    }
}

/// `net/io.rs` is `[net, io]`, `net/mod.rs` is `[net]`, `lib.rs` is `[]`.
fn module_of(file: &Path) -> Vec<String> {
    let mut module: Vec<String> = file
        .with_extension("")
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        module.pop();
    }
    module
}

/// Our crates among a manifest's dependencies that do not belong there; tests may use any.
fn wrong_dependencies(name: &str, allowed: &[&str], manifest: &str) -> Vec<String> {
    let mut section = "";
    let mut wrong = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line;
        }
        let Some(rest) = line.strip_prefix("tulle-") else {
            continue;
        };
        let used = rest.split(['.', ' ', '=']).next().unwrap_or(rest);
        if section == "[dependencies]" && !allowed.contains(&used) {
            wrong.push(format!("{name}/Cargo.toml: {name} must not use {used}"));
        }
    }
    wrong
}

/// All Rust and protobuf sources below a directory, in order, without build output.
fn files_below(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir).expect("the directory is there") {
        let path = entry.expect("the directory can be read").path();
        if path.is_dir() && !path.ends_with("target") {
            found.extend(files_below(&path));
        } else if path
            .extension()
            .is_some_and(|extension| extension == "rs" || extension == "proto")
        {
            found.insert(path);
        }
    }
    found
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate is in the workspace")
        .to_owned()
}

#[test]
fn an_import_that_goes_up_or_sideways_is_found() {
    let check = |file: &str, source: &str| wrong_imports(&PROXY, Path::new(file), source);
    assert_eq!(
        check(
            "outbound/http.rs",
            "use crate::http::body::Body;\nuse crate::outbound::router;"
        ),
        [""; 0]
    );
    assert_eq!(
        check("app.rs", "use crate::config::Config; use crate::net::io;"),
        [""; 0]
    );
    assert_eq!(check("main.rs", "use crate::app;"), [""; 0]);
    assert_eq!(
        check("net/io.rs", "\nuse crate::outbound::router;"),
        ["proxy/src/net/io.rs:2: net (floor 1) imports outbound (floor 5)"]
    );
    assert_eq!(
        check("tls/server.rs", "fn f() { crate::http::body::empty() }"),
        ["proxy/src/tls/server.rs:1: tls (floor 2) imports http (floor 2)"]
    );
    assert_eq!(
        check("inbound/mod.rs", "use super::outbound::router;"),
        ["proxy/src/inbound/mod.rs:1: inbound (floor 5) imports outbound (floor 5)"]
    );
    assert_eq!(
        check("inbound/mod.rs", "mod tests { use super::policy; }"),
        [""; 0],
        "a child with a room's name"
    );
    assert_eq!(
        check("util.rs", ""),
        ["proxy/src/util.rs:1: room util has no floor; put it into the tables"]
    );
    assert_eq!(
        check("net/io.rs", "use crate::Thing;"),
        ["proxy/src/net/io.rs:1: Thing is no room; import from the room that has it"]
    );
}

#[test]
fn a_crate_that_uses_a_higher_one_is_found() {
    let manifest = "[dependencies]\ntulle-core.workspace = true\ntulle-proxy = { path = \"../proxy\" }\n\
                    [dev-dependencies]\ntulle-control.workspace = true\n";
    let wrong = wrong_dependencies("init", &["core"], manifest);
    assert_eq!(wrong, ["init/Cargo.toml: init must not use proxy"]);
}
