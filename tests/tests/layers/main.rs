//! Tests of the structure: modules import only from lower layers and without cycles, crates use only allowed crates, no file
//! exceeds the maximum length, log lines about traffic are limited, and documents name only tests that exist.
//!
//! The tables below are those of `ARCHITECTURE.md`. A file imports from its own top-level module and from lower layers, never
//! from a higher or equal one; all files of the top layer count as one module.

mod cycles;
mod documented;
mod imports;
mod log_lines;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The layers of a crate: its top-level modules, each with its layer.
struct CrateLayers {
    name: &'static str,
    modules: &'static [(&'static str, u8)],
}

const PROXY: CrateLayers = CrateLayers {
    name: "proxy",
    modules: &[
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
        ("app", TOP_LAYER),
        ("config", TOP_LAYER),
        ("env", TOP_LAYER),
        ("fuzz", TOP_LAYER),
        ("linkerd_await", TOP_LAYER),
        ("messages", TOP_LAYER),
    ],
};

const CONTROL: CrateLayers = CrateLayers {
    name: "control",
    modules: &[
        ("model", 0),
        ("resources", 1),
        ("proto_http_method", 1),
        ("kubernetes", 1),
        ("grpc", 1),
        ("trust", 1),
        ("injection", 2),
        ("source", 2),
        ("cluster", 2),
        ("tls", 2),
        ("serving", 3),
        ("destination", 3),
        ("policy", 3),
        ("identity", 3),
        ("webhook", 3),
        ("writeback", 3),
        ("mirror", 3),
        ("remote", 3),
        ("admission", 4),
        ("injector_webhook", 4),
        ("telemetry", 4),
        ("app", TOP_LAYER),
        ("cmd", TOP_LAYER),
        ("config", TOP_LAYER),
        ("fuzz", TOP_LAYER),
        ("listen", TOP_LAYER),
        ("logs", TOP_LAYER),
        ("threads", TOP_LAYER),
    ],
};

/// The layer where everything is built and run; its files count as one module.
const TOP_LAYER: u8 = 9;

/// The crates of this repository that a crate may use outside its tests.
const CRATES: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("proto", &[]),
    ("proxy", &["core", "proto"]),
    ("control", &["core", "proto"]),
    ("init", &["core"]),
    ("cli", &["core", "proto", "control"]),
    // The bench creates the credentials of the mesh that it measures with the code of the control plane, as the CLI does.
    ("bench", &["core", "proto", "proxy", "control"]),
    ("tests", &["core", "proto", "proxy", "control", "init", "cli", "bench"]),
];

const MAX_LINES: usize = 800;

#[test]
fn proxy_modules_import_only_lower_layers() {
    check_layers(&PROXY);
}

#[test]
fn control_plane_modules_import_only_lower_layers() {
    check_layers(&CONTROL);
}

#[test]
fn crates_use_only_allowed_crates() {
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

fn check_layers(crate_layers: &CrateLayers) {
    let src = root().join(crate_layers.name).join("src");
    let mut wrong = Vec::new();
    for file in files_below(&src) {
        let source = fs::read_to_string(&file).expect("sources are readable UTF-8");
        let relative = file.strip_prefix(&src).expect("the file is below the directory");
        wrong.extend(wrong_imports(crate_layers, relative, &source));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The forbidden imports of a file, one line each.
fn wrong_imports(crate_layers: &CrateLayers, file: &Path, source: &str) -> Vec<String> {
    let module = module_path(file);
    // `main.rs` and `lib.rs` are the crate root and belong to the top layer.
    let module_name = module.first().map_or("app", String::as_str);
    let location = |line| format!("{}/src/{}:{line}", crate_layers.name, file.display());
    let Some(layer) = crate_layers.layer(module_name) else {
        return vec![format!(
            "{}: module {module_name} has no layer; add it to the tables",
            location(1)
        )];
    };
    let wrong = imports::imports(source, &module).into_iter().filter_map(|import| {
        let Some(other_module) = import.path.first() else {
            let problem = "imports the crate root; import from the module that defines it";
            return (!module.is_empty()).then(|| format!("{}: {module_name} {problem}", location(import.line)));
        };
        match crate_layers.layer(other_module) {
            Some(other) if other < layer || other_module == module_name || (other, layer) == (TOP_LAYER, TOP_LAYER) => {
                None
            }
            Some(other) => Some(format!(
                "{}: {module_name} (layer {layer}) imports {other_module} (layer {other})",
                location(import.line)
            )),
            None => Some(format!(
                "{}: {other_module} is not a module; import from the module that defines it",
                location(import.line)
            )),
        }
    });
    wrong.collect()
}

impl CrateLayers {
    fn layer(&self, module_name: &str) -> Option<u8> {
        self.modules
            .iter()
            .find(|(name, _)| *name == module_name)
            .map(|(_, layer)| *layer)
    }
}

/// `net/io.rs` is `[net, io]`, `net/mod.rs` is `[net]`, `lib.rs` is `[]`.
fn module_path(file: &Path) -> Vec<String> {
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

/// Forbidden dependencies of a manifest on our crates; dev-dependencies are not restricted.
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

/// All Rust and protobuf sources below a directory, sorted, without build output.
fn files_below(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir).expect("the directory exists") {
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
fn an_import_of_a_higher_or_equal_layer_is_found() {
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
        ["proxy/src/net/io.rs:2: net (layer 1) imports outbound (layer 5)"]
    );
    assert_eq!(
        check("tls/server.rs", "fn f() { crate::http::body::empty() }"),
        ["proxy/src/tls/server.rs:1: tls (layer 2) imports http (layer 2)"]
    );
    assert_eq!(
        check("inbound/mod.rs", "use super::outbound::router;"),
        ["proxy/src/inbound/mod.rs:1: inbound (layer 5) imports outbound (layer 5)"]
    );
    assert_eq!(
        check("inbound/mod.rs", "mod tests { use super::policy; }"),
        [""; 0],
        "a child with the name of a top-level module"
    );
    assert_eq!(
        check("util.rs", ""),
        ["proxy/src/util.rs:1: module util has no layer; add it to the tables"]
    );
    assert_eq!(
        check("net/io.rs", "use crate::Thing;"),
        ["proxy/src/net/io.rs:1: Thing is not a module; import from the module that defines it"]
    );
    let problem = "imports the crate root; import from the module that defines it";
    for source in ["use crate::*;", "use super::super::*;", "use crate::{self as root};"] {
        assert_eq!(
            check("net/io.rs", source),
            [format!("proxy/src/net/io.rs:1: net {problem}")],
            "{source}"
        );
    }
    assert_eq!(
        check("app.rs", "use super::*;"),
        [format!("proxy/src/app.rs:1: app {problem}")]
    );
    assert_eq!(check("main.rs", "mod tests { use super::*; }"), [""; 0]);
}

#[test]
fn a_crate_that_uses_a_forbidden_one_is_found() {
    let manifest = "[dependencies]\ntulle-core.workspace = true\ntulle-proxy = { path = \"../proxy\" }\n\
                    [dev-dependencies]\ntulle-control.workspace = true\n";
    let wrong = wrong_dependencies("init", &["core"], manifest);
    assert_eq!(wrong, ["init/Cargo.toml: init must not use proxy"]);
}
