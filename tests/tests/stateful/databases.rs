//! Databases and caches.

use super::server::{Readiness, Server, TEN_MIB, script};

/// Those of a default run.
pub(super) const SHORT: [Server; 3] = [POSTGRES, MARIADB, REDIS];
/// Those of a full run only.
pub(super) const LONG: [Server; 1] = [MEMCACHED];

const POSTGRES: Server = Server {
    name: "postgres",
    port: 5432,
    unlisted_port: Some(15432),
    start: "
echo secret > /tmp/password
initdb -D /data/db -U postgres -A scram-sha-256 --pwfile=/tmp/password -E UTF8 --no-locale >&2
echo 'host all all all scram-sha-256' >> /data/db/pg_hba.conf
openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=postgres -keyout /data/db/server.key -out /data/db/server.crt
chmod 600 /data/db/server.key
exec postgres -D /data/db -p $PORT -k /tmp -c listen_addresses='*' -c ssl=on",
    readiness: Readiness::Script("pg_isready -h 127.0.0.1 -p $PORT -U postgres"),
    version: "postgres --version",
    client: "
export PGHOST=$host PGPORT=$port PGUSER=postgres PGPASSWORD=secret PGSSLMODE=disable
ask() { psql -qAtX -v ON_ERROR_STOP=1 \"$@\"; }",
    query: script("ask -c 'select 6*7'", "42"),
    large: Some(script(
        "ask -c 'create table if not exists big (v text)' -c 'truncate big'
{ head -c 10485760 /dev/zero | tr '\\0' x; echo; } | ask -c 'copy big from stdin'
ask -c 'select v from big' | tr -d '\\n' | wc -c",
        TEN_MIB,
    )),
    idle: Some(script(
        "{ echo 'select 1;'; sleep $idle; echo 'select 2;'; } | ask",
        "1\n2",
    )),
    own_scenes: &[(
        "TLS of the server",
        script(
            "PGSSLMODE=require ask -c 'select version from pg_stat_ssl where pid = pg_backend_pid()'",
            "TLSv1.3",
        ),
    )],
    ..Server::DEFAULT
};

const MARIADB: Server = Server {
    name: "mariadb",
    port: 3306,
    unlisted_port: Some(13306),
    start: r#"
mariadb-install-db --no-defaults --datadir=/data/db --auth-root-authentication-method=normal --skip-test-db >&2
printf '%s\n' "create user app@'%' identified by 'secret';" "grant all on *.* to app@'%';" "create database app;" > /tmp/init.sql
exec mariadbd --no-defaults --datadir=/data/db --port=$PORT --socket=/tmp/mariadb.sock --bind-address=0.0.0.0 \
  --skip-name-resolve --max-allowed-packet=64M --wait-timeout=28800 --init-file=/tmp/init.sql"#,
    readiness: Readiness::Script("mariadb --no-defaults -h127.0.0.1 -P$PORT -uapp -psecret -e 'select 1'"),
    version: "mariadbd --version",
    client: "
ask() { mariadb --no-defaults -h$host -P$port -uapp -psecret -Ns --unbuffered --max-allowed-packet=64M \"$@\" app; }",
    query: script("ask -e 'select 6*7'", "42"),
    large: Some(script(
        r#"ask -e "create table if not exists big (v longtext); truncate big"
{ printf "insert into big values ('"; head -c 10485760 /dev/zero | tr '\0' x; printf "');"; } | ask
ask -e 'select v from big' | tr -d '\n' | wc -c"#,
        TEN_MIB,
    )),
    idle: Some(script(
        "{ echo 'select 1;'; sleep $idle; echo 'select 2;'; } | ask",
        "1\n2",
    )),
    ..Server::DEFAULT
};

const REDIS: Server = Server {
    name: "redis",
    port: 6379,
    unlisted_port: Some(16379),
    start: "exec redis-server --port $PORT --bind 0.0.0.0 --protected-mode no --dir /data",
    readiness: Readiness::Script("redis-cli -h 127.0.0.1 -p $PORT ping | grep PONG"),
    version: "redis-server --version",
    client: "ask() { redis-cli -h $host -p $port \"$@\"; }",
    query: script("ask set a 42; ask get a", "OK\n42"),
    small_query: Some(script("ask echo 42", "42")),
    large: Some(script(
        "head -c 10485760 /dev/zero | ask -x set big > /tmp/set; ask get big | head -c -1 | wc -c",
        TEN_MIB,
    )),
    idle: Some(script("{ echo 'echo 1'; sleep $idle; echo 'echo 2'; } | ask", "1\n2")),
    ..Server::DEFAULT
};

const MEMCACHED: Server = Server {
    name: "memcached",
    port: 11211,
    unlisted_port: Some(21211),
    start: "exec memcached -p $PORT -I 16m -m 256",
    version: "memcached --version",
    client: "ask() { nc $host $port | tr -d '\\r'; }",
    query: script(
        "printf 'set a 0 0 2\\r\\n42\\r\\nget a\\r\\nquit\\r\\n' | ask",
        "STORED\nVALUE a 0 2\n42\nEND",
    ),
    large: Some(script(
        "{ printf 'set big 0 0 10485760\\r\\n'; head -c 10485760 /dev/zero | tr '\\0' x; printf '\\r\\nquit\\r\\n'; } | ask >&2
printf 'get big\\r\\nquit\\r\\n' | ask | tr -cd x | wc -c",
        TEN_MIB,
    )),
    idle: Some(script(
        "{ printf 'set b 0 0 1\\r\\n1\\r\\n'; sleep $idle; printf 'get b\\r\\nquit\\r\\n'; } | ask",
        "STORED\nVALUE b 0 1\n1\nEND",
    )),
    ..Server::DEFAULT
};
